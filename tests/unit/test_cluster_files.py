"""The files for Slurm and Kubernetes: what can be known of them without either."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.cli import COMMANDS
from async_rl.config import apply_override, parse_config
from async_rl.engines.server import _PORTS

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "cluster" / "slurm.sbatch"
KUBERAY = ROOT / "examples" / "cluster" / "kuberay.yaml"
PAGE = ROOT / "docs" / "cluster.md"


def overrides(text: str) -> list[str]:
    """`dotted.key=value` for our config in a text, shell variables replaced."""
    found = re.findall(r"(?<![\w.])((?:placement|engine|trainer|metrics|weights)\.[\w.]+=[^\s'`]+)", text)
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
    tree.get("trainer", {}).pop("num_ranks", None)
    parse_config(tree)


@pytest.mark.parametrize("words", ["async-rl train", "async-rl doctor"])
def test_commands_exist_when_the_page_names_them(words):
    assert words in PAGE.read_text() + SLURM.read_text()
    assert words.split()[1] in {command.name for command in COMMANDS}


def test_the_slurm_file_is_a_shell_script_when_bash_reads_it():
    subprocess.run(["bash", "-n", SLURM], check=True)
    text = SLURM.read_text()
    assert "set -euo pipefail" in text
    # Ray's workers keep clear of the ports of engines.
    assert int(re.search(r"--max-worker-port=(\d+)", text)[1]) < _PORTS.start
    # The token goes by the environment, not by a command line.
    assert not re.search(r"(srun|ray start|async-rl).*RAY_AUTH_TOKEN", text)


def test_pods_share_a_volume_and_a_token_when_kubernetes_makes_them():
    kinds = documents()
    job = kinds["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    claim = kinds["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert all("secretKeyRef" in one["valueFrom"] for one in container["env"])
        assert group["template"]["metadata"]["labels"]["app"] == "async-rl"
    assert (
        cluster["rayVersion"]
        == re.search(
            r"^ray(?:\[\w+\])?==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE
        )[1]
    )


def test_prometheus_finds_the_driver_when_its_port_is_the_services():
    kinds = documents()
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    port = kinds["Service"]["spec"]["ports"][0]["port"]
    assert f"metrics.port={port}" in kinds["RayJob"]["spec"]["entrypoint"]
    assert {"port": port} in kinds["NetworkPolicy"]["spec"]["ingress"][-1]["ports"]


def test_the_page_lists_the_ports_that_engines_take():
    assert f"{_PORTS.start}-{_PORTS.stop - 1}" in PAGE.read_text()
