"""Kill training runs until it has been done often enough, and compare what they end with.

    python -m tests.chaos [--kills 50] [--seed N] [--minutes 60] [--keep FOLDER]

Exit codes: 0 every run ended as the undisturbed one, 1 something went wrong, or the time was up
before there were so many kills. The seed is printed; with it the same kills fall at the same
moments.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

from tests.chaos.campaign import Campaign
from tests.chaos.processes import KillableServer
from tests.chaos.scene import Servers, courses

STEPS = 40
KILLS_A_RUN = 6
TWICE = 0.15


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after these")
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        help="keep runs and logs there; else only where something went wrong",
    )
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}, {given.kills} kills", flush=True)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="flowtune-chaos-"))
    code = _campaign(folder, seed, given.kills, given.minutes)
    if code == 0 and given.keep is None:
        shutil.rmtree(folder)
    else:
        print(f"runs and logs: {folder}")
    return code


def _tell(words: str) -> None:
    print(words, flush=True)


def _campaign(folder: Path, seed: int, kills: int, minutes: float) -> int:
    deadline = time.monotonic() + 60 * minutes
    killable = KillableServer(folder / "prefect")
    servers = Servers(killable.server, killable)
    try:
        killable.await_ready()
        campaign = Campaign(folder, seed, servers, _tell, twice=TWICE)
        courses_by_turns = cycle(courses(STEPS))
        while (left := kills - campaign.tally.kills.total()) > 0 and time.monotonic() < deadline:
            campaign.disturb(next(courses_by_turns), min(left, KILLS_A_RUN))
    finally:
        servers.stop()
    print(f"seed {seed}: {campaign.tally}")
    for words in campaign.tally.wrong:
        print(f"WRONG: {words}")
    if left > 0:
        print(f"the {minutes:g} minutes were over {left} kills too early")
    return 1 if campaign.tally.wrong or left > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
