"""`make release`: builds all parts of a release into dist/, as far as this machine can, and checks them.

Builds what is committed, not what is in the working tree: sdist and wheel; the chart, with the Helm library
of the extra `deploy`; the images, if docker or podman works. Installs the wheel into an empty environment,
starts its server and asks it. Publishes nothing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
START_TIMEOUT_S = 60.0
SDIST = "from setuptools import build_meta; build_meta.build_sdist('..')"


def main() -> None:
    if run("git", "status", "--porcelain"):
        print("note: there are uncommitted changes, which are not in what is built")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        checkout(tree)
        wheel = build(tree)
        version = wheel.name.split("-")[1]
        done = [wheel.name, next(DIST.glob("*.tar.gz")).name, chart(tree), images(tree, version)]
        environment = Path(directory) / "environment"
        print("installing the wheel into an empty environment ...", flush=True)
        venv.create(environment, with_pip=True)
        run(environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        done.append(serve(environment / "bin"))
    print("\n".join(done))


def run(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """What the command prints on stdout; ends the script with its output if it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def checkout(tree: Path) -> None:
    """A copy of the last commit."""
    tree.mkdir()
    archive = tree.parent / "tree.tar"
    run("git", "archive", "--output", archive, "HEAD")
    run("tar", "-xf", archive, "-C", tree)


def build(tree: Path) -> Path:
    """Builds the sdist of `tree`, and from it alone the wheel, into dist/."""
    print("building sdist and wheel ...", flush=True)
    run(sys.executable, "-c", SDIST, cwd=tree)
    (sdist,) = tree.parent.glob("*.tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", DIST)
    run(sys.executable, "-m", "pip", "wheel", *options, sdist)
    shutil.copy(sdist, DIST)
    return next(DIST.glob("*.whl"))


def chart(tree: Path) -> str:
    try:
        from helm_python.chart import package
    except ImportError:
        return "chart: not packaged: pip install -e '.[deploy]', with Python 3.11 or newer, on x86-64"
    return Path(package(tree / "deploy/helm/lmcache-mp", destination=DIST)).name


def images(tree: Path, version: str) -> str:
    for program in ("docker", "podman"):
        works = shutil.which(program) and subprocess.run([program, "info"], capture_output=True, check=False)
        if works and works.returncode == 0:
            break
    else:
        return "images: not built, because neither docker nor podman works here"
    print(f"building the server's images with {program} ...", flush=True)
    names = []
    for suffix, extra in (("", ""), ("-cuda13", "cuda13")):
        names.append(f"lmcache-mp:{version}{suffix}")
        recipe = ("-f", "deploy/docker/Dockerfile", "--build-arg", f"EXTRA={extra}", "-t", names[-1], ".")
        run(program, "build", *recipe, cwd=tree)
    return f"images: {', '.join(names)} ({program}); vLLM's image is left to a machine with 30 GB of disk"


def serve(programs: Path) -> str:
    """Starts the server of the environment with these programs and asks it, by both names of the command."""
    with tempfile.TemporaryDirectory(prefix="lmc-") as directory:
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "PYTHON"))
        }
        own |= {"LMCACHE_RUNTIME_DIR": f"{directory}/run", "LMCACHE_HTTP_PORT": "0"}
        command = [programs / "lmcache", "server", "--l1-size-gb", "0.02"]
        server = subprocess.Popen(command, cwd=directory, env=own, stderr=subprocess.PIPE, text=True)
        try:
            end_s = time.monotonic() + START_TIMEOUT_S
            ping = [programs / "lmcache", "ping"]
            while subprocess.run(ping, cwd=directory, env=own, capture_output=True, check=False).returncode:
                if server.poll() is not None or time.monotonic() > end_s:
                    server.kill()
                    sys.exit(f"the installed server does not start:\n{server.communicate()[1]}")
                time.sleep(0.1)
            status = run(programs / "lmcache-mp", "status", cwd=Path(directory), env=own)
        finally:
            server.kill()
            server.communicate()
    return f"installed and asked: {status.splitlines()[0]}"


if __name__ == "__main__":
    main()
