"""A Kubernetes API that answers what a real one of version 1.20 answered, and what a test changes of that.

Recorded by `KVLAB_RECORD=tests/fixtures/kubernetes make test-k8s`. That release has no discovery.k8s.io/v1; `slices_v1`
writes its v1beta1 slices as version 1 does.
"""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import yaml

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "kubernetes" / "answers.json").read_text())
PODS = "/api/v1/namespaces/kvlab/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/kvlab/endpointslices"
SERVICE = "/api/v1/namespaces/kvlab/services/kvlab-workers"
ENDPOINTS = "/api/v1/namespaces/kvlab/endpoints/kvlab-workers"


def answer(name):
    """A copy of the recorded body."""
    return copy.deepcopy(RECORDED[name]["body"])


def slices_v1():
    """The recorded slices in version 1: `nodeName` in place of a topology."""
    found = answer("slices-v1beta1")
    found["apiVersion"] = "discovery.k8s.io/v1"
    for one in found["items"]:
        for endpoint in one["endpoints"]:
            endpoint["nodeName"] = endpoint.pop("topology")["kubernetes.io/hostname"]
    return found


class RecordedApi:
    """`with RecordedApi(folder) as api:` serves; `api.answers` maps a path to (status, body), or to bytes."""

    def __init__(self, folder):
        self.kubeconfig = folder / "recorded.conf"
        self.answers = {
            SERVICE: self.of("service"),
            "/api/v1/namespaces/kvlab/services": self.of("services"),
            "/api/v1/namespaces/kvlab/services/other": self.of("no-service"),
            "/api/v1/namespaces/nowhere/services": self.of("no-namespace"),
            "/api/v1/namespaces/nowhere/services/kvlab-workers": self.of("no-service"),
            SLICES: self.of("slices"),
            ENDPOINTS: self.of("endpoints"),
            PODS: self.of("pods"),
        }
        self.asked = []

    @staticmethod
    def of(name):
        """(status, body) as recorded."""
        return RECORDED[name]["status"], answer(name)

    def local(self, port):
        """The pods at 127.0.1.1, 127.0.1.2, ... on this port, and the Service at the first of them."""
        for path, given in self.answers.items():
            text = json.dumps(given).replace("10.77.0.", "127.0.1.").replace("8000", str(port))
            text = text.replace(answer("service")["spec"]["clusterIP"], "127.0.1.1")
            status, body = json.loads(text)
            self.answers[path] = (status, body)

    def body(self, path):
        """The body that is answered at this path, to be changed in place."""
        return self.answers[path][1]

    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        context = {"cluster": "recorded", "user": "recorded"}
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "recorded", "cluster": {"server": url}}],
                    "users": [{"name": "recorded", "user": {"token": "t"}}],
                    "contexts": [{"name": "recorded", "context": context}],
                    "current-context": "recorded",
                }
            )
        )
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def _handler(api):
    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            api.asked.append((self.command, self.path, self.rfile.read(length)))
            given = api.answers.get(unquote(self.path.partition("?")[0]), (404, {"message": "not recorded"}))
            status, body = given() if callable(given) else given
            self.send_response(status)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_header("Content-Length", str(len(data)))
            self.send_header("x-kvlab-exit-code", "0")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_):
            pass

    return Handler
