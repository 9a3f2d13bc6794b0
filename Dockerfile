# kvlab itself, without vLLM: what measures a cluster from inside it. docs/kubernetes.md says how it is used.
#   docker build -t REGISTRY/kvlab:1 .        with a router in it: --build-arg ROUTER=vllm-router==0.1.17
FROM python:3.12-slim
ARG ROUTER=
WORKDIR /kvlab
COPY pyproject.toml README.md ./
COPY kvlab kvlab
RUN pip install --no-cache-dir -e '.[k8s]' $ROUTER
COPY notebooks notebooks
COPY data data
ENTRYPOINT ["kvlab"]
