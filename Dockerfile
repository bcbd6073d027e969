# An image with ownloop in /ownloop:
#   docker build --tag ownloop:cpu .
#   docker build --tag ownloop:gpu --build-arg DEVICE=gpu .
# The image for GPUs brings CUDA; the host brings NVIDIA's driver and container toolkit.
FROM python:3.12-slim
ARG DEVICE=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /ownloop
COPY . .
RUN make setup DEVICE=$DEVICE && .venv/bin/uv cache clean
ENV PATH=/ownloop/.venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["ownloop", "list"]
