"""Builds a real Kubernetes control plane from Debian's source package, once, into the user's cache.

Nothing is installed: apt reads a source list of its own, packages are unpacked beside it, and only the programs stay.
`python tests/control_plane_build.py` builds alone: 5 minutes of two cores, 200 MB fetched, 3 GB meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvlab import engine
from kvlab.errors import EngineMissing

RELEASE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = ("golang-1.19-go", "golang-1.19-src", "etcd-server")
# What kube-proxy calls, and the libraries of that.
NETWORK = ("iptables", "libip4tc2", "libip6tc2", "libxtables12", "libnftnl11", "libmnl0", "conntrack", "ipset")
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy")
VERSION = "v1.20.2"
IMPORT = "k8s.io/kubernetes"


def needs() -> list[str]:
    """What this machine lacks for the build, in words; empty where it can be built."""
    lacking = [] if KEYRING.is_file() else [f"Debian's archive keyring ({KEYRING})"]
    lacking += [f"the program {name}" for name in ("apt-get", "dpkg", "tar") if shutil.which(name) is None]
    return lacking


def folder() -> Path:
    """Where the programs stay: `bin` holds Kubernetes and etcd, `net` what kube-proxy calls."""
    return engine.cache_dir() / "control-plane" / VERSION


def ready() -> bool:
    """Whether everything was built before."""
    return all((folder() / "bin" / name).is_file() for name in (*PROGRAMS, "etcd")) and (folder() / "net").is_dir()


def build() -> Path:
    """The folder with the programs, built where they are not there yet. EngineMissing where that cannot be done."""
    if ready():
        return folder()
    if lacking := needs():
        raise EngineMissing(
            f"The control plane cannot be built here; missing: {', '.join(lacking)}.",
            "it is built from Debian's source package",
            "run this on Debian or Ubuntu, or in a container of debian:bookworm",
        )
    work = Path(tempfile.mkdtemp(prefix="kvlab-control-plane-", dir=os.environ.get("TMPDIR")))
    try:
        _fetch(work)
        _compile(work)
        _keep(work)
    finally:
        _make_removable(work)
        shutil.rmtree(work, ignore_errors=True)
    return folder()


def _run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise EngineMissing(
            f"{' '.join(command[:4])} ... failed ({done.returncode}):\n{(done.stderr or done.stdout)[-1500:]}",
            next_step="without a network, or behind another mirror: DEBIAN_MIRROR=http://... make test-k8s",
        )
    return done.stdout


def mirror() -> str:
    """The archive to fetch from: $DEBIAN_MIRROR, else the one that this machine's own apt uses for the release."""
    if chosen := os.environ.get("DEBIAN_MIRROR"):
        return chosen
    wanted = ("$(REPO_URI)", f"Suite: {RELEASE}"), ("$(REPO_URI)", f"Codename: {RELEASE}")
    for form, which in wanted:
        found = _run(["apt-get", "indextargets", "--format", form, which, "Created-By: Packages"], Path.cwd()).split()
        if found:
            return found[0]
    raise EngineMissing(
        f"This machine's apt knows no archive of Debian {RELEASE}.",
        "it runs another release, or its package lists were never fetched",
        "apt-get update, or name an archive: DEBIAN_MIRROR=http://... make test-k8s",
    )


def _fetch(work: Path) -> None:
    """Debian's packages, checked by apt against Debian's own keys, unpacked into `work`."""
    for name in ("lists/partial", "cache/archives/partial", "debs", "go/src/k8s.io/kubernetes"):
        (work / name).mkdir(parents=True)
    archive = mirror()
    lines = [f"{kind} [signed-by={KEYRING}] {archive} {RELEASE} main\n" for kind in ("deb", "deb-src")]
    (work / "sources.list").write_text("".join(lines))
    places = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-q", *(part for key, value in places.items() for part in ("-o", f"{key}={value}"))]
    print("fetching Debian's packages (about 200 MB)", file=sys.stderr, flush=True)
    _run([*apt, "update"], work)
    _run([*apt, "download", *PACKAGES, *NETWORK], work / "debs")
    _run([*apt, "source", "--download-only", "kubernetes"], work)
    for package in (work / "debs").glob("*.deb"):
        place = "root" if package.name.startswith(PACKAGES) else "net"
        _run(["dpkg", "-x", str(package), str(work / place)], work)
    (source,) = work.glob("kubernetes_*.orig.tar.gz")
    _run(["tar", "xzf", str(source), "--strip-components=1", "-C", str(work / "go/src" / IMPORT)], work)


def _compile(work: Path) -> None:
    goroot, source = work / "root/usr/lib/go-1.19", work / "go/src" / IMPORT
    env = {
        "GOROOT": goroot,
        "GOPATH": work / "go",
        "GOCACHE": work / "cache/go",
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOPROXY": "off",
        "PATH": f"{goroot}/bin:{os.environ['PATH']}",
        "HOME": work,
    }
    env = {name: str(value) for name, value in env.items()}
    low = ["nice", "-n", "15"]
    print("building Kubernetes (about 5 minutes)", file=sys.stderr, flush=True)
    generator = f"{IMPORT}/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    _run([*low, "go", "build", "-o", str(work / "openapi-gen"), generator], source, env)
    _run([*low, str(work / "openapi-gen"), *_openapi_arguments(source, work)], source, env)
    stamp = f"-s -w -X k8s.io/component-base/version.gitVersion={VERSION}"
    stamp += " -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=20"
    programs = [f"{IMPORT}/cmd/{name}" for name in PROGRAMS]
    _run([*low, "go", "build", "-ldflags", stamp, "-o", f"{work}/bin/", *programs], source, env)


def _openapi_arguments(source: Path, work: Path) -> list[str]:
    """The packages that ask for it; Debian ships the source without these generated definitions."""
    tag = "+k8s:openapi-gen="
    tops = ("cmd", "pkg", "plugin", "staging/src/k8s.io")
    files = [path for top in tops for path in (source / top).rglob("*.go") if path.stem != "doc_test"]
    asked = sorted({path.parent for path in files if tag in path.read_text(errors="replace")})
    left_out = ("_examples", "sample-apiserver", "code-generator", "pkg/apis/example")
    folders = [str(path.relative_to(source)) for path in asked]
    packages = [name for name in folders if not any(part in name for part in left_out)]
    packages = [name.replace("staging/src/", f"{IMPORT}/vendor/", 1) for name in packages]
    packages = [name if name.startswith(IMPORT) else f"{IMPORT}/{name}" for name in packages]
    out = ["-O", "zz_generated.openapi", "-p", f"{IMPORT}/pkg/generated/openapi", "-r", str(work / "violations")]
    return ["-i", ",".join(packages), *out, "-h", "hack/boilerplate/boilerplate.generatego.txt"]


def _keep(work: Path) -> None:
    shutil.copy(work / "root/usr/bin/etcd", work / "bin/etcd")
    for family in ("iptables", "ip6tables"):
        for name in (family, f"{family}-save", f"{family}-restore"):  # one program; Debian links it on installing
            (work / "net/usr/sbin" / name).symlink_to("xtables-nft-multi")
    folder().mkdir(parents=True, exist_ok=True)
    for name in ("bin", "net"):
        shutil.rmtree(folder() / name, ignore_errors=True)
        shutil.move(work / name, folder() / name)


def _make_removable(work: Path) -> None:
    subprocess.run(["chmod", "-R", "u+w", str(work)], capture_output=True)


if __name__ == "__main__":
    print(build())
