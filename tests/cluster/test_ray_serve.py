"""The Ray Serve application: what `serve run chairlift.cluster.ray:app` and the manifest for Kubernetes start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_cluster import Raylets, raylets  # before Ray, which reads the environment that it sets

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'chairlift[ray]'")

import yaml
from ray.serve.schema import ServeDeploySchema
from running import Running

from chairlift.cluster.ray.ingress import plan_of
from chairlift.core.errors import SettingsError

MANIFEST = Path(__file__).parents[2] / "deploy" / "rayservice.yaml"


def test_the_manifest_is_one_that_serve_and_our_application_accept() -> None:
    service = yaml.safe_load(MANIFEST.read_text())
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "chairlift.cluster.ray:app"
    plan, on = plan_of(application.args)
    assert plan.models[0].model == "Qwen/Qwen3-8B"
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (on.least, on.most) == (workers["minReplicas"], workers["maxReplicas"])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"modle": "x"}, "unknown field `modle`"),
        ({"replicas": "4..1"}, "--replicas is 4..1"),
        ({"dtype": "float9"}, "dtype is 'float9'"),
        ({"kv_tokens": "many"}, "Expected `int | null`"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(given: dict[str, Any], error: str) -> None:
    with pytest.raises(SettingsError, match=error.replace("|", r"\|")):
        plan_of(given)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets({}) as found:
        yield found


@pytest.mark.long
def test_serve_run_answers_through_the_gateway(cluster: Raylets, tiny_model: Path) -> None:
    """The ingress takes a CPU, and each of the two replicas one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [f"model={tiny_model}", "served_model_name=tiny", "replicas=2", "dtype=float32", "kv_tokens=2048"]
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "proxy_location": "HeadOnly"}
    script = (
        "import sys\nfrom ray import serve\nfrom chairlift.cluster.ray import app\n"
        f"serve.start(**{config!r})\n"
        "serve.run(app(dict(each.split('=', 1) for each in sys.argv[1:])), blocking=True)\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": cluster.cluster.address}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, stderr=log, stdout=log)
        server = Running(f"http://127.0.0.1:{port}", process)

        def answers() -> bool:
            assert process.poll() is None, (log.seek(0), log.read()[-4000:])
            try:
                return list(server.get("/health").json()["servers"].values()) == ["ok", "ok"]
            except (httpx.HTTPError, ValueError, KeyError):
                return False

        try:
            start = time.monotonic()
            server.wait_until(answers, 400)
            print(f"ready after {time.monotonic() - start:.0f} s")
            body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            whole = server.post("/v1/completions", body)
            assert whole.status_code == 200
            streamed = server.post("/v1/completions", {**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n") and streamed.text.count('"text"') > 1
            assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["tiny"]
            assert server.post("/v1/completions", {**body, "temperature": -1}).status_code == 400
            assert server.metric("replica_up", replica="replica-1") == 1
        finally:
            process.terminate()
            process.wait(60)
