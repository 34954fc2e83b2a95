"""Try the server with the clients that people use, each as a new user would, and print a table of what works.

    python tests/clients/run.py --install          # once: an environment for each set of clients, some 4 GB
    python tests/clients/run.py                    # against this tree; minutes on two cores
    python tests/clients/run.py --source OTHER/src --output before.json

It starts a real server with the default model. `try_NAME.py` has what is tried of each client; it runs in the
environment of its requirements file, since the clients' own requirements exclude each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "serving")]
from running import running  # noqa: E402

MODEL = "smollm2-135m"
ENVIRONMENTS = dict.fromkeys(("openai", "anthropic", "langchain", "prometheus"), "light") | {
    name: name
    for name in ("llama_index", "litellm", "instructor", "pydantic_ai", "llm", "aider", "lm_eval", "guidellm")
}


def install(folder: Path) -> None:
    """Make the environments, one for each requirements file."""
    for name in dict.fromkeys(ENVIRONMENTS.values()):
        home = folder / name
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(HERE / f"{name}.txt")]
        subprocess.run(pip, check=True)


def try_client(name: str, folder: Path, url: str) -> list[dict[str, object]]:
    """Everything that is tried of one client."""
    python = folder / ENVIRONMENTS[name] / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(HERE / f"try_{name}.py"), url, MODEL],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if done.returncode != 0 or not found:
        found.append({"what": "the whole script", "ok": False, "said": done.stderr[-300:]})
    for each in found:
        print(f"{name:12} {'ok ' if each['ok'] else 'NO '} {each['what']}: {each['said']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument("--environments", type=Path, default=Path("/tmp/chairlift-clients"), help="where they are")
    parser.add_argument("--source", type=Path, default=HERE.parent.parent / "src", help="which Chairlift to serve with")
    parser.add_argument("--only", help="names of clients, with commas")
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
    chosen = parser.parse_args()
    if chosen.install:
        install(chosen.environments)
    names = chosen.only.split(",") if chosen.only else list(ENVIRONMENTS)
    with running(MODEL, environment={"PYTHONPATH": str(chosen.source)}) as server:
        found = {name: try_client(name, chosen.environments, server.url) for name in names}
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(found, indent=2))
    failed = sum(not each["ok"] for tried in found.values() for each in tried)
    print(f"{failed} of {sum(map(len, found.values()))} attempts failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
