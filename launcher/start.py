"""`python .../launcher/start.py FOLDER MODULE [ARGS]`: run `MODULE.main()` of this package, whatever the folder is.

`python -m` and `python -c` put the working folder first on the module search path: a file there called json.py or
launcher.py would run in place of the real one. Python puts only this file's own folder there, which leaves at once.
FOLDER is appended to the path unless it is there already, or empty.
"""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
folder, module = sys.argv[1:3]
del sys.argv[1:3]
if folder and folder not in sys.path:
    sys.path.append(folder)
sys.exit(__import__(module, fromlist=["main"]).main())
