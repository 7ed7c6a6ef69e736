"""Runs the steps of the Dockerfile in a folder, for a host without Docker. Needs root, unshare, tar and git.

    debootstrap --variant=minbase bookworm ROOT
    python scripts/docker_steps.py ROOT runs        # the words after ROOT go to the image's entry point

ROOT imitates the base image: Debian 12 with Python 3.11 for Ubuntu 24.04 with Python 3.12, without NVIDIA's variables.
COPY takes tracked files, VOLUME does nothing. What the host's package mirrors need goes into ROOT/etc beforehand.
"""

import json
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

CONTEXT = Path(__file__).parents[1]
root, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
uid, gid, folder = "0", "0", "/"


def inside(*command):
    """Run a command in the root as the image would; leave with its exit code if it fails."""
    [home] = re.findall(
        rf"^[^:]*:[^:]*:{uid}:.*:(.*):", (root / "etc/passwd").read_text(), flags=re.M
    )
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    place = [f"--root={root}", f"--wd={folder}", f"--setuid={uid}", f"--setgid={gid}"]
    if code := subprocess.run(
        [*isolated, *place, *command], env=variables | {"HOME": home}
    ).returncode:
        sys.exit(code)


lines = re.sub(r"^ *#.*\n", "", (CONTEXT / "Dockerfile").read_text(), flags=re.M).replace(
    "\\\n", ""
)
for instruction, rest in (line.split(maxsplit=1) for line in lines.splitlines() if line):
    print(f"== {instruction} {rest}", flush=True)
    match instruction, rest.split():
        case "FROM", _:
            inside(
                "sh",
                "-c",
                "id --user 1000 || useradd --create-home --uid 1000 --shell /bin/bash ubuntu",
            )
        case "RUN", _:
            inside("sh", "-c", rest)
        case "USER", [user]:
            uid, gid = user.split(":")
        case "WORKDIR", [folder]:
            (root / folder[1:]).mkdir(parents=True, exist_ok=True)
        case "COPY", ["--chown=1000:1000", ".", "."]:
            pack = "tar --null --anchored --exclude-from=.dockerignore --owner=+1000 --group=+1000 -cT -"
            pipe = f"git -c safe.directory='*' ls-files -z | {pack} | tar -xC {root / folder[1:]}"
            subprocess.run(["bash", "-o", "pipefail", "-c", pipe], check=True, cwd=CONTEXT)
        case "ENV", _:
            for name, value in (pair.split("=", 1) for pair in shlex.split(rest)):
                variables[name] = string.Template(value).substitute(variables)
        case "ENTRYPOINT", _:
            arguments = json.loads(rest) + arguments
        case "VOLUME", _:
            pass
        case _:
            sys.exit(f"docker_steps: unknown form: {instruction} {rest}")
inside(*arguments)
