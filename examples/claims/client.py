"""An agent that claims tasks of a run: the reference client of agent_loops.claims.

    ASYNC_RL_CLAIMS_KEY=… python client.py http://127.0.0.1:8800

It asks the policy once and posts a reward of its own. Replace `do_task`; keep `claim_tasks`.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import openai
import requests


def do_task(claim: dict) -> float:
    """Do a claimed task with any client of OpenAI or Anthropic, and return its reward."""
    client = openai.OpenAI(base_url=claim["base_url"], api_key=claim["api_key"], timeout=None)
    answer = client.chat.completions.create(model=claim["model"], messages=claim["task"]["messages"])
    return float(len(answer.choices[0].message.content or "") < 200)


def claim_tasks(url: str, key: str) -> None:
    """Claim tasks, renew them while they are done, and post how they ended."""
    api = requests.Session()
    api.headers["Authorization"] = f"Bearer {key}"
    while True:
        try:
            answer = api.post(f"{url}/v1/claims", json={"wait_s": 20}, timeout=60)
        except requests.ConnectionError:
            time.sleep(1)  # the run has not begun, or begins again
            continue
        if answer.status_code == 204:
            continue
        answer.raise_for_status()
        claim = answer.json()
        done = threading.Event()
        threading.Thread(target=renew, args=(url, key, claim, done), daemon=True).start()
        try:
            end = {"reward": do_task(claim)}
        except Exception as error:
            end = {"failure": f"{type(error).__name__}: {error}"}
        done.set()
        try:
            api.post(f"{url}/v1/claims/{claim['id']}/end", json=end, timeout=60)
        except requests.ConnectionError:
            continue  # the claim is lost with its run, which gives the task out again


def renew(url: str, key: str, claim: dict, done: threading.Event) -> None:
    """Renew a claim until its task is done; 410 says that it is lost, and its end is not used."""
    headers = {"Authorization": f"Bearer {key}"}
    while not done.wait(claim["lease_s"] / 3):
        requests.post(f"{url}/v1/claims/{claim['id']}/renew", headers=headers, timeout=claim["lease_s"])


if __name__ == "__main__":
    claim_tasks(sys.argv[1].rstrip("/"), os.environ["ASYNC_RL_CLAIMS_KEY"])
