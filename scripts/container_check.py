"""Build the serving image for real, run it as docs/security.md says, and hold its answers to the bundles.

    scripts/container-check [--keep] [--mirror URL]

Needs root, Debian's `debootstrap` and `buildah` (installed with apt-get where missing), and no Docker. The digits
example is exported to every CPU format; `deployer build --wheels` and buildah (chroot isolation, vfs storage in a
temporary folder) make one image of all of them on a Debian bookworm base. Its server then runs as `docker run
--read-only --tmpfs /state --cap-drop ALL --security-opt no-new-privileges --network none` would run it, by util-linux
in namespaces of its own: where cgroups are not to be had, container runtimes do not start.

Exit codes: 0 all passed, 1 something failed, 4 this machine cannot do it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from deployer.package.container import build_command

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("onnx", "aoti", "torchscript", "exported")
TOOLS = {"debootstrap": "debootstrap", "buildah": "buildah", "unshare": "util-linux", "nsenter": "util-linux"}
SUITE, SUITE_PYTHON = "bookworm", (3, 11)
BASE, IMAGE = "localhost/container-check-base", "localhost/container-check"
NEEDED_BYTES = 15e9
LIMIT_BYTES = 1.5e9
READY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60
USER = 10001
DROP = (
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--inh-caps=-all",
    "--bounding-set=-all", "--",
)  # fmt: skip

#: what a container runtime does before it starts process 1; $1 is the image's folder, the rest what is started
SETUP = f"""
set -eu
root=$1; shift
mount --make-rprivate /
ip link set lo up
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
for name in null zero full random urandom; do touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
mkdir "$root/dev/shm"
mount -t tmpfs -o nosuid,nodev,noexec,mode=1777,size=64m tmpfs "$root/dev/shm"
mount -o remount,ro "$root/dev"
mount -t tmpfs -o nosuid,nodev,mode=0700,uid={USER},gid={USER} tmpfs "$root/state"
mount -o remount,bind,ro "$root"
exec chroot "$root" "$@"
"""

COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|c\+\+filt|cpp|clang|ld|as|make|rustc|go)(-[\d.]+)?|pip[\d.]*")


@dataclass
class Table:
    """What was checked; printed as it is found out."""

    failed: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, what: str, passed: bool, found: object = "") -> None:
        self.failed += not passed
        self.rows.append(f"| {what} | {'passed' if passed else 'FAILED'} | {found} |")
        print(self.rows[-1], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder, with images and logs")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", help="of Debian packages")
    options = parser.parse_args()
    if fault := machine_fault():
        print(f"error: the container cannot be checked here: {fault}", file=sys.stderr)
        return 4
    install_tools()
    work = Path(tempfile.mkdtemp(prefix="container-check-"))
    table = Table()
    print(f"working in {work}\n\n| check | result | found |\n| --- | --- | --- |", flush=True)
    try:
        Check(work, table).run(options.mirror)
    except subprocess.CalledProcessError as error:
        table.add(" ".join(map(str, error.cmd[:3])), False, f"exit code {error.returncode}, see {work}/log")
    finally:
        if options.keep or table.failed:
            print(f"\nlog: {work}/log" if options.keep else "\nthe end of the log:\n" + tail(work / "log"))
        if not options.keep:
            shutil.rmtree(work)
    print(f"\n{len(table.rows) - table.failed} of {len(table.rows)} checks passed")
    return 1 if table.failed else 0


def machine_fault() -> str:
    if os.geteuid() != 0:
        return "it makes file systems and namespaces, which needs root"
    if sys.version_info[:2] != SUITE_PYTHON:
        return f"Debian {SUITE} has Python 3.11, this is {sys.version_info.major}.{sys.version_info.minor}"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing and shutil.which("apt-get") is None:
        return f"{', '.join(missing)} are missing, and there is no apt-get"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < NEEDED_BYTES:
        return f"{tempfile.gettempdir()} has {free / 1e9:.0f} GB free, {NEEDED_BYTES / 1e9:.0f} are needed"
    return ""


def install_tools() -> None:
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        print(f"installing {', '.join(missing)} with apt-get")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "--yes", *missing]):
            subprocess.run(["apt-get", "--quiet=2", *words], check=True, env=environment, stdout=2)


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "no log"


class Check:
    def __init__(self, work: Path, table: Table) -> None:
        self.work, self.table = work, table
        storage = work / "storage.conf"
        storage.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{work}/storage"\nrunroot = "{work}/run"\n')
        (work / "tmp").mkdir()
        self.environment = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(storage),
            "TMPDIR": str(work / "tmp"),
        }
        self.environment.pop("STORAGE_DRIVER", None)  # would win over the file
        self.log = (work / "log").open("ab")

    def run(self, mirror: str) -> None:
        bundles = self.make_bundles()
        self.make_base(mirror)
        self.build_image(list(bundles))
        container = self.buildah("from", "--pull-never", IMAGE)
        image = Path(self.buildah("mount", container))
        config = json.loads(self.buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
        self.check_files(image, config)
        with self.started(image, config) as server:
            self.check_server(server, config, bundles)

    def call(
        self, words: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, codes: Sequence[int] = (0,)
    ) -> str:
        """Run to the end, stderr into the log; returns stdout. Raises CalledProcessError."""
        self.log.write(f"\n$ {' '.join(map(str, words))}\n".encode())
        self.log.flush()
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=self.log, env=environment, check=False, cwd=ROOT)
        self.log.write(done.stdout)
        self.log.flush()
        if done.returncode not in codes:
            done.check_returncode()
        return done.stdout.decode().strip()

    def buildah(self, *words: str) -> str:
        return self.call(["buildah", *words], environment=self.environment)

    def deployer(self, *words: str | Path) -> str:
        return self.call([sys.executable, "-m", "deployer", *words], environment=self.environment)

    def make_bundles(self) -> dict[Path, Path]:
        """archive → bundle, one of each format, each with a name of its own since one server takes them all."""
        trained = self.work / "digits"
        self.call([sys.executable, ROOT / "examples/digits/train.py", trained])
        made = {}
        for form in FORMATS:
            checkpoint = self.work / f"checkpoint-{form}"
            shutil.copytree(trained, checkpoint)
            described = json.loads((checkpoint / "checkpoint.json").read_text())
            described["spec"]["name"] = f"digits-{form}"
            (checkpoint / "checkpoint.json").write_text(json.dumps(described))
            self.deployer("export", checkpoint, "--format", form, "-o", self.work / "bundles")
            bundle = self.work / "bundles" / f"digits-{form}-{form}-fp32"
            self.deployer("package", bundle, "--workers", "1", "-o", self.work / "models")
            made[self.work / "models" / f"digits-{form}.mar"] = bundle
        self.table.add("bundles through the gate", True, ", ".join(FORMATS))
        return made

    def make_base(self, mirror: str) -> None:
        """Debian's own Python, with what `docker.io/library/python` has besides: the name `python`, venv and pip."""
        container = self.buildah("from", "scratch")
        folder = Path(self.buildah("mount", container))
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        self.call(["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(folder), mirror])
        (folder / "usr/bin/python").symlink_to("python3")
        for used in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(folder / used)
        size = total_bytes(folder)
        self.buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        self.buildah("commit", "--rm", container, BASE)
        self.table.add(f"base image by debootstrap {SUITE}", True, f"{size / 1e6:.0f} MB")

    def build_image(self, mars: Sequence[Path]) -> None:
        context = self.work / "context"
        self.deployer("build", *mars, "-o", context, "--base-image", BASE, "--wheels", "--builder", "none")
        lines = [line for line in (context / "requirements.txt").read_text().splitlines() if "==" in line]
        hashed = sum("--hash=sha256:" in line for line in lines)
        self.table.add("every package is pinned with its hash", hashed == len(lines), f"{hashed} of {len(lines)}")
        command = ["unshare", "--net", *build_command("buildah", context, IMAGE)]
        self.call(command, environment=self.environment)
        self.table.add("the Dockerfile builds, without a network", True, "buildah, chroot isolation, vfs")
        shutil.rmtree(context / "wheels")

    def check_files(self, image: Path, config: Mapping[str, Any]) -> None:
        """What can be seen without starting anything."""
        add = self.table.add
        add("the image names its user", config["User"] == f"{USER}:{USER}", config["User"])
        health = config.get("Healthcheck", {}).get("Test", [])
        add("the image has its health check", bool(health), " ".join(health))
        total = total_bytes(image)
        add(f"size at most {LIMIT_BYTES / 1e9:.1f} GB", total <= LIMIT_BYTES, f"{total / 1e6:.0f} MB, base included")
        packages = next((image / "opt/venv/lib").glob("python3*/site-packages"))
        sizes = self.call([sys.executable, ROOT / "deployer/package/slim.py", "--sizes", packages])
        for line in sizes.splitlines():
            print(f"|   {' '.join(line.split())} | | |")
        bins = [
            folder for pattern in ("*bin", "usr/*bin", "usr/local/*bin", "opt/*/bin") for folder in image.glob(pattern)
        ]
        tools = sorted({path.name for folder in bins for path in folder.iterdir() if COMPILERS.fullmatch(path.name)})
        add("no compiler, linker, make or pip", not tools, ", ".join(tools) or f"in {len(bins)} folders of programs")
        pips = [path for path in walk(image) if path.name == "__main__.py" and path.parent.name in ("pip", "ensurepip")]
        add("no module pip", not pips, ", ".join(map(str, pips)) or "anywhere")
        as_user = ["chroot", str(image), *DROP, "find", "/", *PRUNED, "-writable", "-print"]
        found = self.call(as_user, codes=FIND_CODES).split()
        allowed = {"/state", "/tmp", "/var/tmp", "/run/lock"}  # noqa: S108 - the names are compared, not written to
        add("without --read-only, writable:", set(found) <= allowed, ", ".join(found))

    @contextmanager
    def started(self, image: Path, config: Mapping[str, Any]) -> Iterator[psutil.Process]:
        """The image's entrypoint as process 1 of its own namespaces: no network but its loopback, no capability, a
        read-only root."""
        words = [
            "unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child",
            "sh", "-c", SETUP, "setup", str(image), *as_image(config), *config["Entrypoint"],
        ]  # fmt: skip
        with (self.work / "server.log").open("wb") as log:
            outer = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while not (children := psutil.Process(outer.pid).children()):
                if outer.poll() is not None:
                    break
                time.sleep(0.05)
            if not children:
                raise subprocess.CalledProcessError(outer.returncode, words)
            yield children[0]
            code = None
            if outer.poll() is None:
                began = time.monotonic()
                children[0].send_signal(signal.SIGINT)  # the image's STOPSIGNAL
                with suppress(subprocess.TimeoutExpired):
                    code = outer.wait(STOP_TIMEOUT_S)
                self.table.add(
                    "stops on SIGINT as process 1", code == 0, f"{time.monotonic() - began:.1f} s, code {code}"
                )
        finally:
            outer.kill()  # --kill-child: and with it the namespace
            outer.wait()
            self.log.write(b"\nthe server:\n" + (self.work / "server.log").read_bytes())
            self.log.flush()

    def check_server(self, server: psutil.Process, config: Mapping[str, Any], bundles: Mapping[Path, Path]) -> None:
        add = self.table.add
        inside = [
            "nsenter",
            "-t",
            str(server.pid),
            "-m",
            "-n",
            "-p",
            "-i",
            "-u",
            "--root",
            "--wd",
            "--",
            *as_image(config),
        ]
        began = time.monotonic()
        said = ""
        while time.monotonic() - began < READY_TIMEOUT_S and server.is_running():
            done = subprocess.run(
                [*inside, *config["Healthcheck"]["Test"][1:]], capture_output=True, text=True, check=False
            )
            said = done.stderr.strip()
            if done.returncode == 0:
                break
            time.sleep(1)
        else:
            add("the health check says ready", False, said)
            return
        add("the health check says ready", True, f"after {time.monotonic() - began:.0f} s; before: {said or 'nothing'}")
        family = [server, *server.children(recursive=True)]
        facts = [facts_of(process) for process in family]
        add(
            "no process is root",
            all(fact["Uid"] == f"{USER} " * 3 + str(USER) for fact in facts),
            f"{len(facts)} of {USER}",
        )
        bare = all(
            int(fact["CapEff"], 16) == int(fact["CapBnd"], 16) == 0 and fact["NoNewPrivs"] == "1" for fact in facts
        )
        add("no capability, no new privileges", bare, "")
        found = self.call([*inside, "find", "/", *PRUNED, "-writable", "-print"], codes=FIND_CODES).split()
        outside = [path for path in found if path != "/state" and not path.startswith("/state/")]
        add(
            "read-only root: only /state is writable",
            bool(found) and not outside,
            ", ".join(outside) or f"{len(found)} paths",
        )
        token = self.work / "token"
        token.touch(0o600)
        token.write_text(self.call([*inside, "cat", "/state/token"]))
        netns = ["nsenter", "-t", str(server.pid), "-n", "--"]
        url = "http://127.0.0.1:8080/predictions"
        for mar, bundle in bundles.items():
            for given, expected in ((None, (400, "InvalidKeyException")), (token, (200, "7"))):
                answer = json.loads(
                    self.call([*netns, sys.executable, "-c", ASK, f"{url}/{mar.stem}", str(given or "")])
                )
                add(
                    f"{mar.stem}: POST {'with the token' if given else 'without a token'}",
                    tuple(answer) == expected,
                    answer,
                )
            words = ["verify", f"{url}/{mar.stem}", "--bundle", str(bundle), "--token-file", str(token), "--json"]
            report = json.loads(self.call([*netns, sys.executable, "-m", "deployer", *words], codes=(0, 1)))
            add(
                f"{mar.stem}: answers are the bundle's references",
                report["passed"],
                f"{report['right']} of {report['sent']}, {report['bit_equal']} bit-equal",
            )


FIND_CODES = (0, 1)  # 1: some folder cannot be read, which is as it should be
PRUNED = ("(", "-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/dev", ")", "-prune", "-o", "!", "-type", "l")

#: [status, label] of one plain request, in the standard library alone
ASK = f"""
import json, sys, urllib.error, urllib.request
url, token = sys.argv[1:]
headers = {{"Content-Type": "application/json"}}
if token:
    headers["Authorization"] = "Bearer " + open(token).read().strip()
body = open({str(ROOT / "examples/digits/seven.json")!r}, "rb").read()
try:
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        print(json.dumps([answer.status, json.load(answer)["labels"]["logits"]]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.load(error)["type"]]))
"""


def as_image(config: Mapping[str, Any]) -> list[str]:
    """Words that start what follows with the image's environment, user and folder, and no capability."""
    change = f'cd {config["WorkingDir"]} && exec "$@"'
    return ["env", "-i", *config["Env"], *DROP, "sh", "-c", change, "sh"]


def facts_of(process: psutil.Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {key: " ".join(value.split()) for key, value in pairs}


def walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place) / name for name in [*folders, *files])


def total_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in walk(folder))


if __name__ == "__main__":
    sys.exit(main())
