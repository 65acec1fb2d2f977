"""`cluster.toml`: what it says of machines and of Ray, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorium.actors.cluster.cluster_control import first_replicas
from actorium.actors.cluster.router_actor import capacities
from actorium.actors.config.tree import Config
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.launcher import preflight
from actorium.actors.runtime.roles import roles_of, stop_rank
from actorium.tools.cli import cluster_nodes
from actorium.tools.cli.cluster_nodes import hint, read_cluster_file, serve_words
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.serve_command import ServeOptions

NULL = "\n[flags]\nnull_worker = true\nskip_tokenizer = true\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text + NULL)
    return path


def configured(path: Path, ray: bool = False, address: str = "") -> Config:
    file = read_cluster_file(path, ray, address)
    return validate(parse("x", serve_words(file, path.parent / "keys"), ServeOptions).config)


def test_ray_places_nodes_beside_those_that_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, 'listen = "tcp://10.0.0.1:7400"\n[nodes.a]\nreplicas = 2\n'
                             "[ray]\nreplicas = 2\nmost = 3\ncpus = 4\n")
    config = configured(path)
    cluster = config.cluster
    assert cluster.nodes == {"a": 2, "ray-0": 1, "ray-1": 1, "ray-2": 1}
    assert (cluster.ray_address, cluster.ray_replicas, cluster.ray_cpus) == ("auto", 2, 4.0)
    first = first_replicas(cluster).replicas
    assert [state.node for state in first] == ["a", "ray-0", "ray-1", "a"]
    assert capacities(cluster) == {"a": 2, "ray-0": 1, "ray-1": 1, "ray-2": 1}
    assert roles_of(config)["ray"].endswith("ray_actor:build")
    assert stop_rank("ray") == stop_rank("nodes")
    told = hint(read_cluster_file(path), tmp_path)
    assert "a.key" in told and "ray-0" not in told


def test_the_flag_alone_is_enough(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    cluster = configured(path, ray=True).cluster
    assert len(cluster.nodes) == 8 and cluster.cluster_listen == "tcp://0.0.0.0:7400"
    assert len(first_replicas(cluster).replicas) == 1
    assert configured(path, address="10.0.0.9:6379").cluster.ray_address == "10.0.0.9:6379"


def test_without_ray_nothing_changes(tmp_path: Path) -> None:
    config = configured(written(tmp_path, 'listen = "tcp://h:1"\n[nodes.a]\n[nodes.ray-0]\n'))
    assert config.cluster.ray_address is None and "ray" not in roles_of(config)
    assert [state.node for state in first_replicas(config.cluster).replicas] == ["a", "ray-0"]


def test_a_head_without_replicas_needs_no_device(tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "has_driver", lambda: False)
    text = 'device = "cuda"\n'
    path = tmp_path / "c.toml"
    for replicas, refused in ((0, False), (1, True)):
        path.write_text(f"replicas = {replicas}\n[ray]\n[flags]\n{text}")
        config = configured(path)
        if refused:
            with pytest.raises(BadConfig, match="no CUDA device"):
                preflight.check_machine(config)
        else:
            preflight.check_machine(config)


@pytest.mark.parametrize(("text", "why"), [
    ("", "nodes: at least one is needed, or --ray"),
    ("[nodes.a]\n", "listen: is missing"),
    ("[ray]\nreplicas = 0\n", "ray.replicas: must be between 1 and ray.most"),
    ("[ray]\nreplicas = 4\nmost = 2\n", "ray.replicas: must be between 1 and ray.most"),
    ("[ray]\nmost = 65\n", "ray.most: must be at most 64"),
    ("[ray]\ngpus = 1\n", "gpus"),
    ("[ray]\n[nodes.ray-0]\n", "nodes.ray-0: such names are those of the nodes that Ray"),
    ("[ray]\naddress = 'ray://h:1'\n", "--ray-address: must be HOST:PORT, auto or local"),
    ("[ray]\ncpus = -1\n", "--ray-cpus: must be between 0 and 4096")])
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(BadConfig) as refused:
        configured(written(tmp_path, text))
    assert why in refused.value.message


@pytest.mark.parametrize(("words", "why"), [
    ([], "FILE is missing"), (["--ray"], "FILE is missing"),
    (["c.toml", "--dtype", "float32"], "--dtype: is for the file to say")])
def test_a_command_line_that_cannot_be(words: list[str], why: str) -> None:
    with pytest.raises(BadConfig) as refused:
        cluster_nodes.up(words)
    assert why in refused.value.message


def test_without_ray_installed_the_extra_is_named(tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    found = preflight.find_spec
    monkeypatch.setattr(preflight, "find_spec",
                        lambda name: None if name == "ray" else found(name))
    config = configured(written(tmp_path, "[ray]\n"))
    with pytest.raises(BadConfig, match=r"ray_address: .*: pip install -e '.\[cluster\]'"):
        preflight.check_packages(config)


@pytest.mark.parametrize("flag", ["api_key", "admin-key", "admin-api-key"])
def test_a_file_with_a_key_that_others_could_change_is_refused(tmp_path: Path, flag: str) -> None:
    path = written(tmp_path, 'listen = "tcp://10.0.0.1:7400"\n[nodes.a]\n')
    path.chmod(0o606)
    assert read_cluster_file(path).nodes
    path.write_text(path.read_text() + f'{flag} = "sk-one"\n')
    with pytest.raises(BadConfig, match="flags: there is a key in it, and others could change"):
        read_cluster_file(path)
    path.chmod(0o604)
    assert read_cluster_file(path).nodes
