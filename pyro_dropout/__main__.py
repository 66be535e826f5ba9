"""The commands of ``pyro-dropout`` where no script is installed: ``python -m pyro_dropout``."""

import sys

from pyro_dropout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
