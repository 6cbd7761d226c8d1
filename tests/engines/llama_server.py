"""The server of llama.cpp, from the package `xllamacpp`. It serves until its standard input closes, so it does not outlive its parent.

    python llama_server.py MODEL.gguf PORT [--context N] [--slots N]

It prints one line when it serves. The context of one request is N tokens, as many as vLLM's `--max-model-len`.
"""

import argparse
import os
import sys

import xllamacpp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--context", type=int, default=4_096)
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {"tiny"}
    params.port = options.port
    params.n_parallel = options.slots
    # llama.cpp divides it among the slots.
    params.n_ctx = options.context * options.slots
    # The template of the model, with its tools.
    params.use_jinja = True
    # The machine of the tests also runs the program under test.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # A thread belongs to a connection, and waits for its next request for seconds: with fewer threads than connections, others wait for it.
    params.n_threads_http = 320
    server = xllamacpp.Server(params)
    print(f"serves at {server.listening_address}", flush=True)
    sys.stdin.buffer.read()
    # Without the end of the interpreter, which waits for requests.
    os._exit(0)


if __name__ == "__main__":
    main()
