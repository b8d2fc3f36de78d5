"""Entry point of the agent."""

import sys

from launcher.agent.main import main

sys.exit(main())
