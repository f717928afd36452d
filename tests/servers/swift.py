"""A real S3 service for a test session: OpenStack Swift with its s3api, on loopback.

Swift checks signatures, honours `If-None-Match: *`, speaks multi-part uploads and answers bulk
deletes, in processes of its own. It looks at `If-None-Match` without a lock, where Amazon's S3 lets
exactly one of two simultaneous creators through: a filter before it lets such requests through one
by one. It installs from PyPI (wheels for all it needs, no package of the
system's) into an environment apart, `.venv-swift`, because its pins would disturb the project's.
`python -m tests.servers.swift` only installs it, for a Makefile; the fixtures do so if it is
missing, and a failure to install is the test's failure.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.prefect_server import free_port, stop_process

CACHE = Path(__file__).resolve().parents[2] / ".venv-swift"
ENVIRONMENT = CACHE / "environment"
REQUIREMENTS = ("swift==2.38.3", "eventlet==0.41.3", "pyeclib==1.8.0", "xattr==1.3.0")
START_TIMEOUT_SECONDS = 60.0

KEY = "test:tester"
SECRET = "testing"
BUCKET = "flowtune-tests"

MAKE_RINGS = """
import sys
from swift.common.ring import RingBuilder
folder, *rings = sys.argv[1:]
for ring in rings:
    name, port = ring.split("=")
    builder = RingBuilder(4, 1, 1)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port),
                     "replication_ip": "127.0.0.1", "replication_port": int(port),
                     "device": "disk", "weight": 1})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{name}.ring.gz")
"""

ONE_BY_ONE = """
from collections import defaultdict
from eventlet.semaphore import Semaphore

def filter_factory(global_conf, **local_conf):
    turns = defaultdict(Semaphore)
    def make(app):
        def serve(env, start_response):
            if env["REQUEST_METHOD"] == "GET" or "HTTP_IF_NONE_MATCH" not in env:
                return app(env, start_response)
            with turns[env["PATH_INFO"]]:
                return app(env, start_response)
        return serve
    return make
"""

COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {devices}
mount_check = false
user = {user}
workers = 0
log_level = WARNING
"""

STORAGE = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
container_update_timeout = 30
"""

PROXY = """
[pipeline:main]
pipeline = catch_errors one_by_one listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:one_by_one]
paste.filter_factory = one_by_one:filter_factory
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
max_bucket_listing = 50
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""

STORAGE_SERVERS = ("account", "container", "object")


class SwiftError(RuntimeError):
    """The service could not be installed or started; says why and shows the end of its output."""


def install() -> None:
    """Make the environment if it is not there, whole and of these versions.

    Several test processes may ask at once: one installs, the others wait. A marker is written
    last, so that an installation that was interrupted is done again.
    """
    marker = CACHE / "installed.txt"
    wanted = "\n".join([*REQUIREMENTS, sys.version.split()[0]])
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.is_file() and marker.read_text() == wanted:
            return
        marker.unlink(missing_ok=True)
        _run(sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT))
        pip = str(ENVIRONMENT / "bin" / "pip")
        _run(pip, "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS)
        marker.write_text(wanted)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SwiftError(f"`{' '.join(command)}` ended with {done.returncode}:\n{tail}")


@dataclass
class S3Server:
    """The service while it runs, and what a client needs to use it."""

    endpoint: str
    folder: Path
    key: str = KEY
    secret: str = SECRET
    bucket: str = BUCKET
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that lead any S3 client here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start every server that is not running and wait until all of them listen."""
        for name in (*STORAGE_SERVERS, "proxy"):
            if name not in self._processes:
                self._processes[name] = self._spawn(name)
        for name in self._processes:
            self._await_port(name)

    def stop(self) -> None:
        """Stop all servers; what was stored stays, and `start` serves it again."""
        for process in self._processes.values():
            process.terminate()
        while self._processes:
            stop_process(self._processes.popitem()[1])

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        program = ENVIRONMENT / "bin" / f"swift-{name}-server"
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [program, self.folder / f"{name}-server.conf", "--verbose"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(self.folder)},
            )

    def _await_port(self, name: str) -> None:
        conf = (self.folder / f"{name}-server.conf").read_text()
        port = int(conf.partition("bind_port = ")[2].split()[0])
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                ended = self._processes[name].poll() is not None
                if ended or time.monotonic() > deadline:
                    tail = (self.folder / f"{name}.log").read_text()[-2000:]
                    raise SwiftError(f"swift's {name} server does not listen:\n{tail}") from None
                time.sleep(0.05)


@contextmanager
def running_swift(folder: Path) -> Iterator[S3Server]:
    """Serve S3 from an empty folder for the length of the block, with one bucket in it."""
    install()
    devices = _place_with_xattrs(folder)
    server = S3Server(f"http://127.0.0.1:{_configure(folder, devices)}", folder)
    try:
        server.start()
        client(server).call_s3("create_bucket", Bucket=server.bucket)
        yield server
    finally:
        server.stop()
        shutil.rmtree(devices, ignore_errors=True)


def client(server: S3Server) -> Any:
    """An s3fs client of the service, whatever the environment says."""
    import s3fs

    return s3fs.S3FileSystem(
        key=server.key,
        secret=server.secret,
        endpoint_url=server.endpoint,
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def _configure(folder: Path, devices: Path) -> int:
    """Write rings and settings of all four servers; returns the proxy's port."""
    (devices / "disk").mkdir()
    ports = {name: free_port() for name in (*STORAGE_SERVERS, "proxy")}
    user = pwd.getpwuid(os.getuid()).pw_name
    for name, port in ports.items():
        own = PROXY if name == "proxy" else STORAGE.format(name=name)
        common = COMMON.format(port=port, folder=folder, devices=devices, user=user)
        (folder / f"{name}-server.conf").write_text(common + own)
    (folder / "one_by_one.py").write_text(ONE_BY_ONE)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
    rings = [f"{name}={ports[name]}" for name in STORAGE_SERVERS]
    _run(str(ENVIRONMENT / "bin" / "python"), "-c", MAKE_RINGS, str(folder), *rings)
    return ports["proxy"]


def _place_with_xattrs(folder: Path) -> Path:
    """A new folder for the objects on a file system that keeps extended attributes."""
    for place in (folder, CACHE):
        devices = place / f"devices-{uuid.uuid4().hex[:8]}"
        devices.mkdir()
        try:
            os.setxattr(devices, "user.flowtune", b"1")
        except OSError:
            devices.rmdir()
        else:
            return devices
    raise SwiftError(
        f"neither {folder} nor {CACHE} keeps extended attributes, which Swift needs; "
        "point TMPDIR at a disk (ext4, xfs, btrfs)"
    )


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The session's S3 service, with one bucket."""
    with running_swift(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture
def aws(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The service, with this process's AWS environment pointed at it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**s3.settings, "AWS_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def s3_uri(aws: S3Server) -> str:
    """An empty place in the bucket, and the environment to use it."""
    return f"s3://{aws.bucket}/{uuid.uuid4().hex[:8]}"


if __name__ == "__main__":
    install()
