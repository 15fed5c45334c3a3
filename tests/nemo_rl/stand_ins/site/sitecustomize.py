"""Python runs this at the start of the driver and of every worker process, since its folder is on PYTHONPATH."""

from stand_ins import import_hooks

import_hooks.install()
