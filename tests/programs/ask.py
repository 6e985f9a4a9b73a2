"""Asks an OpenAI-compatible server one question per line of stdin (JSON: model, question, max_tokens), greedily.

Runs in the serving environment. Waits until the server answers at all; prints {"models": […]} and then one answer a line.
"""

import json
import sys
import time

import openai


def main(base_url: str, patience_s: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=300)
    deadline = time.monotonic() + float(patience_s)
    while True:
        try:
            print(json.dumps({"models": [model.id for model in client.models.list()]}), flush=True)
            break
        except openai.APIConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = client.chat.completions.create(
            model=asked["model"],
            messages=[{"role": "user", "content": asked["question"]}],
            max_tokens=asked["max_tokens"],
            temperature=0,
        )
        print(json.dumps({"answer": answer.choices[0].message.content}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
