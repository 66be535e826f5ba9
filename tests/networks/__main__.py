"""Prints the table of docs/benchmarks.md: ``python -m tests.networks [NETWORK ...]``; all of them take half an hour."""

import sys

from tests.networks.rows import line
from tests.networks.zoo import ZOO

print("| network | dropout on rows | noise of its own | predicts as in training mode | compiled training |")
print("|---|---|---|---|---|")
for name in sys.argv[1:] or ZOO:
    print(line(name), flush=True)
