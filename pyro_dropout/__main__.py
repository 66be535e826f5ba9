"""The commands of ``pyro-dropout`` where no script is installed, as under torchrun: ``python -m pyro_dropout``."""

import sys

from pyro_dropout.cli.main import main
from pyro_dropout.cli.repository import report

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(main())
    print(f"{report()}\nAll commands: python -m pyro_dropout --help")
