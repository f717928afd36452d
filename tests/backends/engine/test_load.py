"""Locks: 512 samples at once neither fail nor keep heartbeats waiting."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tinker
from engine_process import KEY, EngineProcess
from tinker import types

SAMPLES = 512
HEARTBEAT_SECONDS = 1.0
"""The SDK sends one every 10 s and gives each as many."""

BEAT = """
import json, sys, threading, time, httpx
url, key, session_id = sys.argv[1:]
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
took = []
with httpx.Client(base_url=url, headers={"X-API-Key": key}) as http:
    while not over.wait(0.01):
        started = time.perf_counter()
        answer = http.post("/api/v1/session_heartbeat", json={"session_id": session_id})
        took.append(time.perf_counter() - started)
        answer.raise_for_status()
        if len(took) == 1:
            print("beating", flush=True)
print(json.dumps(took))
"""
"""A process of its own: the one that asks for the samples is too busy to take the time."""


def _draw(sampler: tinker.SamplingClient, number: int) -> Any:
    params = types.SamplingParams(max_tokens=1 + number % 24, seed=number, stop=[])
    text = types.ModelInput.from_ints([1 + number % 50] * (1 + number % 17))
    return sampler.sample(text, 1, params)


def test_512_samples_at_once(shared_engine: EngineProcess, engine_home: Path) -> None:
    service = tinker.ServiceClient(base_url=shared_engine.url, api_key=KEY)
    base = str(engine_home / "base")
    client = service.create_lora_training_client(base, rank=4, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    session_id = client.model_id.partition(":")[0]
    alone = [_draw(sampler, number).result() for number in range(3)]
    command = [sys.executable, "-c", BEAT, shared_engine.url, KEY, session_id]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as beating:
        assert beating.stdout is not None
        assert beating.stdout.readline() == "beating\n"
        futures = [_draw(sampler, number) for number in range(SAMPLES)]
        together = [future.result() for future in futures]
        took = json.loads(beating.communicate()[0])
    assert beating.returncode == 0
    for number, response in enumerate(together):
        assert len(response.sequences[0].tokens) == 1 + number % 24
    for one, same in zip(alone, together, strict=False):
        assert one.sequences[0].tokens == same.sequences[0].tokens
    assert len(took) > 10
    assert statistics.quantiles(took, n=100, method="inclusive")[98] < HEARTBEAT_SECONDS
    service.close("success").result()
