"""Runs one program where it can do no harm: started by `sandbox.py` as a process of its own.

    python -I -S jail.py STATUS_FD < job.json

writes to STATUS_FD `ready` when all limits stand, and then `exit N` or `timeout`. In namespaces of
its own the program sees the system and Python, read-only, an empty /tmp of bounded size, no other
process, and no network; whatever it starts ends with it. That is Linux only: user_namespaces(7),
mount_setattr(2). Imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NOBODY = 65534

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set the limits up, run the job that stands on the input, and report how it ended."""
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    job = json.load(sys.stdin)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with who started it
    if job["namespaces"]:
        _enter_namespaces(job["network"])
    child = os.fork()
    if child == 0:
        _guarded(_init if job["namespaces"] else _program, job, status)
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    try:
        code = _wait(child)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(status, b"exit %d\n" % code)
    except TimeoutError:
        os.write(status, b"timeout\n")
    os.killpg(0, signal.SIGKILL)  # whatever is left, and this process


def _time_is_up(signum: int, frame: object) -> NoReturn:
    raise TimeoutError


def _guarded(work: Any, job: dict[str, Any], status: int) -> NoReturn:
    """A child's part of the work; it never returns to where it was forked."""
    try:
        work(job, status)
    except BaseException as error:  # noqa: BLE001  (what has not become the program is at fault)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(70)


def _wait(child: int) -> int:
    """The exit code of a child, 128 + n if the signal n ended it; others are reaped."""
    while True:
        pid, ended = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(ended)
            return code if code >= 0 else 128 - code


# --- a world of its own -------------------------------------------------------------------------


def _enter_namespaces(network: bool) -> None:
    """Leave the system's users, mounts, processes and network; the next child is its process 1.

    Inside, the program is `nobody`. That is this user for the system, or, if this is root, nobody
    too: limits on the number of processes do not hold for root.
    """
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    flags |= 0 if network else CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setgroups([])
        maps = {"uid_map": f"0 0 1\n{NOBODY} {NOBODY} 1", "gid_map": f"0 0 1\n{NOBODY} {NOBODY} 1"}
        _unshare_with(flags, maps)
    else:
        _check(libc.unshare(flags), "unshare")
        maps = {"setgroups": "deny", "uid_map": f"{NOBODY} {user} 1"}
        _write_maps(os.getpid(), {**maps, "gid_map": f"{NOBODY} {group} 1"})


def _unshare_with(flags: int, maps: dict[str, str]) -> None:
    """Enter namespaces whose ids a helper writes, as only who stays outside may map several."""
    inside, entered = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(entered)
        if os.read(inside, 1):
            _write_maps(parent, maps)
        os._exit(0)
    _check(libc.unshare(flags), "unshare")
    os.write(entered, b"1")
    os.waitpid(helper, 0)


def _write_maps(pid: int, maps: dict[str, str]) -> None:
    for name, text in maps.items():
        Path(f"/proc/{pid}/{name}").write_text(text)


def _init(job: dict[str, Any], status: int) -> None:
    """Process 1 of the new world: when it ends, the kernel ends all others in there."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _new_root(job)
    child = os.fork()
    if child == 0:
        _guarded(_program, job, status)
    os.close(status)
    os._exit(_wait(child))


def _new_root(job: dict[str, Any]) -> None:
    """Make the working directory the root of a file system with what Python needs, and no more.

    A process in a chroot may not create user namespaces, so there is no way back to privileges.
    """
    root = Path.cwd()
    _mount(None, Path("/"), None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    (root / "tmp").mkdir()
    size = f"size={job['files_bytes']},nr_inodes=10000,mode=1777"
    _mount("tmpfs", root / "tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    network = NETWORK if job["network"] else ()
    for path in map(Path, [*SYSTEM, *network, *sorted(job["readable"], key=len)]):
        inside = root / path.relative_to("/")
        if str(path) in SYSTEM and path.is_symlink():  # /lib is usr/lib
            inside.symlink_to(path.readlink())
        elif path.exists() and not inside.exists():  # it does in a folder that is shown already
            _show(path, inside)
            _set(inside, AT_RECURSIVE, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for device in map(Path, DEVICES):
        _show(device, root / device.relative_to("/"))
    _set(root, 0, ATTR_RDONLY)
    os.chroot(root)
    os.chdir("/tmp")


def _show(path: Path, inside: Path) -> None:
    """Let a file or folder be seen in the new root."""
    if path.is_dir():
        inside.mkdir(parents=True)
    else:
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.touch()
    _mount(str(path), inside, None, MS_BIND | MS_REC)


def _mount(
    source: str | None, target: Path, kind: str | None, flags: int, data: str | None = None
) -> None:
    given = (source, str(target), kind, data)
    texts = [None if text is None else text.encode() for text in given]
    result = libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mount {target}")


def _set(path: Path, flags: int, attributes: int) -> None:
    attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    arguments = (AT_FDCWD, str(path).encode(), flags, ctypes.byref(attr), ctypes.sizeof(attr))
    _check(libc.syscall(MOUNT_SETATTR, *arguments), f"mount_setattr {path}")


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


# --- the program --------------------------------------------------------------------------------


def _program(job: dict[str, Any], status: int) -> None:
    """Become the program, in the working directory, with nothing of this process's environment."""
    program, stdin = Path("main.py"), Path("input")
    program.write_text(job["program"], "utf-8", "surrogatepass")
    stdin.write_text(job["stdin"], "utf-8", "surrogatepass")
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    stdin.unlink()
    if job["namespaces"]:
        program.chmod(0o444)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if sys.platform == "linux":
        _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    for name, value in job["rlimits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    os.write(status, b"ready\n")
    try:
        os.execve(job["python"], [job["argv0"], "-I", "-B", "-X", "utf8", "main.py"], job["env"])
    except OSError:
        os.write(status, b"failed\n")
        raise


if __name__ == "__main__":
    main()
