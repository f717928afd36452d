"""The code verifier: its tests, and a sandbox that is attacked from the inside."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from algorithms.rewards import sandbox
from algorithms.rewards.code import CodeTests, code_of
from algorithms.rewards.sandbox import Limits, Outcome, SandboxError
from backends.errors import UserError
from tests.algorithms.samples import chat
from tests.algorithms.test_verifiers import against, reward, section

pytestmark = pytest.mark.skipif(
    sandbox.isolation_problem() is not None, reason="no user namespaces on this machine"
)

SUM = {**chat("Write add(a, b).", "-"), "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
ECHO = {
    **chat("Double the number.", "-"),
    "tests": [{"input": "2\n", "output": "4\n"}, {"input": "-1\n", "output": "-2"}],
}
RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


async def attack(program: str, **limits: Any) -> Outcome:
    return await sandbox.run(program, "", Limits(**limits))


def running(mark: str) -> list[str]:
    """The processes of this machine that have the mark on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "completion", "right"),
    [
        (SUM, RIGHT, 1.0),
        (SUM, RIGHT.replace("+", "-"), 0.0),
        (SUM, "def add(a, b):\n    return sum((a, b))", 1.0),
        (SUM, "I cannot.", 0.0),
        (SUM, "", 0.0),
        (SUM, "```python\nimport sys\nsys.exit(0)\n```", 0.0),
        (SUM, "```python\nimport os\nos._exit(0)\n```", 0.0),
        ({**SUM, "tests": "assert add('a', 'b') == 'ab'"}, RIGHT, 1.0),
        (ECHO, "```python\nprint(2 * int(input()))\n```", 1.0),
        (ECHO, "```python\nprint(2 + int(input()))\n```", 0.0),
        (ECHO, "```python\nprint(4)\n```", 0.0),
        (ECHO, "```python\nprint(2 * int(input()), ' \\n')\n```", 1.0),
        (ECHO, "```python\nprint(2 * int(input()))\nraise SystemExit(1)\n```", 0.0),
    ],
)
async def test_code_is_worth_what_its_tests_say(
    row: dict[str, Any], completion: str, right: float
) -> None:
    assert await reward("code", row, completion) == right


async def test_code_without_an_end_is_wrong_and_no_error() -> None:
    assert await reward("code", SUM, "while True: pass", seconds=0.3) == 0.0


def test_the_last_block_behind_the_reasoning_is_the_answer() -> None:
    assert code_of("<think>```\na\n```</think>```py\nb\n```\nor\n```python\nc\n```") == "c\n"
    assert code_of("<think>no</think>x = 1") == "x = 1"
    assert code_of("  ```\n  x = 1\n  ```") == "  x = 1\n"


def test_a_row_needs_tests() -> None:
    assert against("code", SUM) == against("code", ECHO) == ""
    assert against("code", {**SUM, "own": "assert 1"}, tests_field="own") == ""
    assert "has no tests" in against("code", chat("q", "a"))
    for tests in ([], " ", [1], [{"input": "1"}], {"input": "1", "output": "2"}):
        assert "tests are no tests" in against("code", {**SUM, "tests": tests})


def test_where_nothing_can_be_isolated_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "unshare: not permitted")
    with pytest.raises(UserError) as caught:
        section("code").build()
    (problem,) = caught.value.problems
    assert problem.where == "verifier.params.isolation"
    assert "unshare: not permitted" in problem.what
    assert "isolation: limits and network: allow" in problem.remedy
    assert isinstance(section("code", isolation="limits", network="allow").build(), CodeTests)


# --- attacks ------------------------------------------------------------------------------------


async def test_an_endless_loop_ends() -> None:
    began = time.monotonic()
    assert (await attack("while True: pass", seconds=0.3)).end == "timeout"
    assert (await attack("import time; time.sleep(60)", seconds=0.3)).end == "timeout"
    assert time.monotonic() - began < 20


async def test_ten_gigabytes_are_refused() -> None:
    outcome = await attack("block = b'x' * 10**10")
    assert outcome.code == 1
    assert "MemoryError" in outcome.stderr


BOMB = """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError as error:
    print(children, error.strerror)
"""


async def test_a_fork_bomb_stays_small() -> None:
    outcome = await attack(BOMB, processes=6)
    children, why = outcome.stdout.split(maxsplit=1)
    assert 1 <= int(children) <= 8
    assert "temporarily unavailable" in why


async def test_printing_for_ever_ends() -> None:
    began = time.monotonic()
    for stream in ("stdout", "stderr"):
        program = f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
        assert await attack(program, output_bytes=10_000) == Outcome("output", -1, "", "")
    assert time.monotonic() - began < 20


@pytest.fixture
def for_all(tmp_path: Path) -> Iterator[Path]:
    """A folder that anyone may write to, and in which nobody did."""
    tmp_path.chmod(0o777)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


async def test_nothing_can_be_written_outside(for_all: Path) -> None:
    program = """
import os, sys
for place in ("/x", "/usr/x", "/etc/x", "/dev/x", sys.prefix + "/x", sys.base_prefix + "/x", TMP):
    try:
        open(place, "w").write("x")
        print("wrote", place)
    except OSError as error:
        pass
os.makedirs("/tmp/mine")
open("/tmp/mine/x", "w").write("mine")
print(open("/tmp/mine/x").read(), sorted(os.listdir("/tmp")))
"""
    outcome = await attack(program.replace("TMP", repr(str(for_all / "x"))))
    # Python itself is there too, read-only, if that is where it is installed.
    pythons = {Path(prefix).parts for prefix in (sys.prefix, sys.base_prefix)}
    installed = {parts[2] for parts in pythons if parts[1] == "tmp"}
    assert outcome.stdout == f"mine {sorted({'main.py', 'mine'} | installed)}\n"


async def test_files_have_little_room() -> None:
    outcome = await attack(
        "for n in range(5): open(f'f{n}', 'wb').write(b'x' * 2**20)", files_bytes=2**21
    )
    assert "No space left" in outcome.stderr


async def test_secrets_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = uuid4().hex
    monkeypatch.setenv("API_KEY", secret)
    file = tmp_path / "credentials"
    file.write_text(secret)
    program = f"""
import glob, os
print(dict(os.environ))
for path in [{str(file)!r}, os.path.expanduser("~/.netrc"), *glob.glob("/proc/*/environ")]:
    try:
        print(open(path, "rb").read())
    except OSError as error:
        print(type(error).__name__)
print(os.listdir("/proc") if os.path.exists("/proc") else "no proc", os.getpid())
"""
    outcome = await attack(program)
    assert outcome.code == 0
    assert secret not in outcome.stdout
    assert "no proc 2" in outcome.stdout
    assert set(eval(outcome.stdout.splitlines()[0])) <= {*sandbox.ENVIRONMENT, "LC_CTYPE"}


async def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 2)
        print("connected")
    except OSError as error:
        print(error.strerror)
print([name for _, name in socket.if_nameindex()])
"""
        outcome = await attack(program)
        assert "connected" not in outcome.stdout
        assert outcome.stdout.count("unreachable") == 2
        allowed = await attack(program, network=True)
        assert allowed.stdout.startswith("connected\n")


async def test_there_is_no_way_back_to_privileges() -> None:
    outcome = await attack("""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
tried = [libc.unshare(0x10000000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
         libc.chroot(b"/tmp"), libc.setuid(0), libc.ptrace(16, 1, 0, 0)]
print(tried, os.getuid())
for target in (1, -1):
    try:
        os.kill(target, 9)
    except OSError:
        pass
print("alive")
""")
    assert outcome.stdout == "[-1, -1, -1, -1, -1] 65534\nalive\n"


GRANDCHILD = """
import subprocess, sys
subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)", MARK], start_new_session=True
)
"""


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("then", ["", "while True: pass"])
async def test_no_process_outlives_its_program(then: str, isolated: bool) -> None:
    mark = uuid4().hex
    program = GRANDCHILD.replace("MARK", repr(mark)) + then
    if not isolated:  # the limits end what is in the process group, and no more
        program = program.replace(", start_new_session=True", "")
    outcome = await attack(program, seconds=1.0 if then else 20.0, isolated=isolated)
    assert outcome.end == ("timeout" if then else "exit"), outcome
    assert running(mark) == []


async def test_giving_up_ends_the_program() -> None:
    mark = uuid4().hex
    program = GRANDCHILD.replace("MARK", repr(mark)) + "while True: pass"
    task = asyncio.create_task(attack(program, seconds=30.0))
    while not running(mark):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(mark) == []


# --- without namespaces, and when the sandbox itself fails --------------------------------------


async def test_limits_alone_hold_time_memory_and_output() -> None:
    alone: dict[str, Any] = {"isolated": False, "network": True}
    assert (await attack("print(1)", **alone)).stdout == "1\n"
    assert "MemoryError" in (await attack("block = b'x' * 10**10", **alone)).stderr
    assert (await attack("while True: print('x')", output_bytes=1000, **alone)).end == "output"
    assert "API_KEY" not in (await attack("import os; print(os.environ)", **alone)).stdout
    assert (await attack("import os; print(os.listdir())", **alone)).stdout == "['main.py']\n"


async def test_a_sandbox_that_does_not_start_is_an_error_and_never_a_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "jail.py"
    broken.write_text("import sys\nsys.exit('no jail today')\n")
    monkeypatch.setattr(sandbox, "JAIL", broken)
    with pytest.raises(SandboxError, match="no jail today"):
        await attack("print(1)")
    with pytest.raises(UserError, match="code raised SandboxError"):
        await reward("code", SUM, RIGHT)


async def test_what_the_program_says_of_itself_is_not_believed() -> None:
    outcome = await attack(
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'exit 0')\n"
        "  except OSError: pass\nos._exit(9)"
    )
    assert (outcome.end, outcome.code) == ("exit", 9)
