"""Stands in for vLLM in fast tests: one small HTTP server that misbehaves as told by CHILD (words, space separated).

Started by the real leash under the real VllmServer; no measurement is ever made with it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",kv_cache_size_tokens="1600",num_gpu_blocks="100"} 1.0\n'
)


def serve(port, words, name="kvlab", key=None, models=None):
    """A server object; `words` name how it misbehaves."""
    cached = set()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, status, value):
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self.answer(401, {"error": "no key"})
            elif self.path == "/v1/models" and "not-json" not in words:
                entries = [{"id": n, "max_model_len": 512, "root": "x"} for n in models or [name]]
                self.answer(200, {"object": "list", "data": entries})
            elif self.path == "/metrics" and "no-metrics" not in words:
                self.answer(200, INFO)
            elif self.path == "/version" and "no-metrics" not in words:
                self.answer(200, {"version": "9.9.9"})
            else:
                self.answer(200 if "not-json" in words else 404, "<html>")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            if self.path == "/reset_prefix_cache":
                self.reset()
            elif "no-completion" in words or max(body["prompt"]) >= 4096:
                self.answer(400 if max(body["prompt"]) >= 4096 else 503, {"error": {"message": "not now"}})
            else:
                self.complete(tuple(body["prompt"]))

        def reset(self):
            if "no-reset" in words:
                return self.answer(404, {"detail": "Not Found"})
            if "lying-reset" not in words and "refusing-reset" not in words:
                cached.clear()
            self.answer(200, {"success": "refusing-reset" not in words})

        def complete(self, prompt):
            hit = len(prompt) - 1 if prompt in cached else 0
            if "no-cache" not in words:
                cached.add(prompt)
            details = None if "no-details" in words else {"cached_tokens": hit}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "prompt_tokens_details": details}
            self.answer(200, {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage})

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main():
    port, words = int(sys.argv[1]), os.environ.get("CHILD", "").split()
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("(APIServer pid=1) INFO 11-29 10:00:00 [a.py:1] non-default args: {}", flush=True)
    if "worker" in words:
        # A session of its own, as an engine might have: only the mark in its environment tells whose it is.
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(f"(EngineCore pid={worker.pid}) INFO 11-29 10:00:02 [a.py:1] Initializing a V1 LLM engine", flush=True)
        print("CPU KV cache size: 1,600 tokens, Maximum concurrency for 512 tokens per request: 3.12x", flush=True)
    if "crash" in words:
        print("ValueError: the estimated maximum model length is 96. Try", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(7)
    if "silent" in words:
        time.sleep(600)
    server = serve(port, words)
    if "late-completion" in words:
        words.append("no-completion")
        threading.Timer(1.2, lambda: words.remove("no-completion")).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
