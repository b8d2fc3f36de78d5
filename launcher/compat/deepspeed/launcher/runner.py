"""`deepspeed.launcher.runner`: where variables for ranks on other hosts are written; `launch` reads that file, too."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
