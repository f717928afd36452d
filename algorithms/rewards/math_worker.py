"""The process that compares mathematics: a JSON question on each line in, two lines out.

`true` or `false`: can the right answer be read? And, if so: is the other one equal to it? Started
by `mathematics.py`. An answer may ask for 9**9**9**9, which no exception stops Python from
computing: hence a process, which the system ends when a question has had its CPU time. Imports
nothing of the project.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Answer questions until there are no more."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it warns of every answer that is no mathematics
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed on the way is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("true", file=answers, flush=True)  # ready
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_seconds"])  # SIGPROF ends the process
        gold = parse(asked["expected"], parsing_timeout=None)
        print(json.dumps(bool(gold)), file=answers, flush=True)
        if gold:
            given = parse(asked["answer"], parsing_timeout=None)
            equal = verify(gold, given, timeout_seconds=None)
            print(json.dumps(equal), file=answers, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
