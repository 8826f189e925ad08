"""The files for Slurm and Kubernetes, as far as they can be tested without either."""

import math
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config import apply_override, parse_config
from async_rl.engines.sglang.server import PORTS

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "cluster" / "slurm.sbatch"
KUBERAY = ROOT / "examples" / "cluster" / "kuberay.yaml"
PAGE = ROOT / "docs" / "guide" / "scaling-up.md"


def overrides(text: str) -> list[str]:
    """Return the `dotted.key=value` overrides in a text, with shell variables replaced."""
    found = re.findall(r"(?<![\w.])((?:placement|engine|trainer|metrics|weights)\.[\w.]+=[^\s'`…]+)", text)
    return [re.sub(r"\"?\$\{?\w+\}?(:\$\w+)?\"?", "auto", override) for override in found]


def documents() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(KUBERAY.read_text())}


@pytest.mark.parametrize("file", [SLURM, KUBERAY, PAGE], ids=lambda file: file.name)
def test_settings_exist_when_a_file_names_them(file):
    found = overrides(file.read_text())
    assert found
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    for override in found:
        apply_override(tree, override)
    # Overrides of several commands: the number of ranks of one need not fit the layout of another.
    trainer = tree.setdefault("trainer", {})
    trainer["num_ranks"] = math.prod(trainer.get("layout", {}).values())
    parse_config(tree)


@pytest.mark.parametrize("file", [SLURM, PAGE], ids=lambda file: file.name)
def test_the_installed_ray_knows_its_options_when_a_file_starts_it(file):
    commands = re.findall(r"ray start (?:[^\n]*\\\n)*[^\n]*|ports=\(.*\)", file.read_text())
    named = {option for command in commands for option in re.findall(r"--[\w-]+", command)}
    assert {"--head", "--address", "--port"} <= named
    source = Path(find_spec("ray").origin).with_name("scripts") / "scripts.py"
    assert named <= set(re.findall(r'"(--[\w-]+)', source.read_text()))


COMMANDS_OF_A_NODE = {
    "scontrol": 'case $1 in show) printf "%s\n" n1 n2 n3;; *) echo "$*" >> "$LOG/scontrol";; esac',
    "srun": """while [ "${1#-}" != "$1" ]; do
  case $1 in -w) on=$2; shift;; --nodes=*) nodes=$1;; esac
  shift
done
echo "$nodes on ${on:-others}: $*" >> "$LOG/srun"
exec "$@\"""",
    "hostname": 'case $1 in --ip-address) echo 127.0.1.1;; *) echo "fd00::2 10.0.0.7 10.1.0.7";; esac',
    "ray": "case $1 in health-check) exit 0;; esac; exec sleep 600",
    "async-rl": """echo "$RAY_AUTH_MODE $*" >> "$LOG/async-rl"
until [ "$(grep -c 'ray start' "$LOG/srun")" = 2 ]; do :; done  # else they are ended before they are there
eval "$DRIVER\"""",
}
"""Replacements of the commands that the file calls, in a job of three nodes on loopback addresses."""

WARNED = "sleep 600 & trap 'kill $!; exit 143' TERM; kill -TERM $PPID; wait"
"""A driver that exits in order after Slurm has announced the time limit."""


@pytest.mark.parametrize(("driver", "code", "requeued"), [("exit 4", 4, False), (WARNED, 143, True)])
def test_the_job_ends_as_its_driver_does_when_slurm_runs_the_file(tmp_path, driver, code, requeued):
    bin_, log = tmp_path / "venv" / "bin", tmp_path / "log"
    bin_.mkdir(parents=True)
    log.mkdir()
    for name, text in COMMANDS_OF_A_NODE.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)
    slurm = {"JOB_ID": "17", "JOB_NUM_NODES": "3", "JOB_NODELIST": "n[1-3]", "SUBMIT_DIR": str(tmp_path)}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {"VENV": str(tmp_path / "venv"), "LOG": str(log), "DRIVER": driver}
    ended = subprocess.run(["bash", SLURM, "c.yaml", "run.seed=1"], env={**os.environ, **environment})
    assert ended.returncode == code
    address = "10.0.0.7:6379"  # neither of the loopback interface nor IPv6
    (started,) = (log / "async-rl").read_text().splitlines()
    assert started.startswith(f"token train c.yaml run.seed=1 placement.ray_address={address} ")
    steps = (log / "srun").read_text()
    assert "--nodes=1 on n1: ray start --head" in steps
    assert re.search(rf"--nodes=2 on others: ray start --block .*--address={address} ", steps)
    assert (log / "scontrol").exists() == requeued
    if requeued:
        assert (log / "scontrol").read_text() == "requeue 17\n"


def test_pods_share_a_volume_and_a_token_when_kubernetes_makes_them():
    kinds = documents()
    job = kinds["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    claim = kinds["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in cluster["workerGroupSpecs"]:  # Ray's workers keep clear of the ports of engines
        assert int(group["rayStartParams"]["max-worker-port"]) < PORTS.start
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert all("secretKeyRef" in one["valueFrom"] for one in container["env"])
        assert group["template"]["metadata"]["labels"]["app"] == "async-rl"
    pinned = (ROOT / "requirements" / "cpu.txt").read_text()
    assert cluster["rayVersion"] == re.search(r"^ray(?:\[\w+\])?==(\S+)", pinned, re.MULTILINE)[1]


def test_prometheus_finds_the_driver_when_its_port_is_the_services():
    kinds = documents()
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    port = kinds["Service"]["spec"]["ports"][0]["port"]
    assert f"metrics.port={port}" in kinds["RayJob"]["spec"]["entrypoint"]
    assert {"port": port} in kinds["NetworkPolicy"]["spec"]["ingress"][-1]["ports"]
