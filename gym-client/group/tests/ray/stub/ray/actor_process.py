"""The process of an actor: runs the calls of the driver in threads, and ends with the driver."""

import concurrent.futures
import importlib.util
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback


def main():
    descriptor, path, name, max_concurrency = sys.argv[1:]
    # As `ray start` does for all processes of a node.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    connection = multiprocessing.connection.Connection(int(descriptor))
    os.set_inheritable(connection.fileno(), False)
    # Ray sends the class by value. It is the same one in this file.
    spec = importlib.util.spec_from_file_location("driver", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    actor = getattr(module, name)()
    lock = threading.Lock()

    def run(number, call):
        try:
            method, arguments = pickle.loads(call)
            answer = (number, True, getattr(actor, method)(*arguments))
        except Exception:
            answer = (number, False, traceback.format_exc())
        with lock:
            connection.send(answer)

    pool = concurrent.futures.ThreadPoolExecutor(int(max_concurrency))
    try:
        while True:
            pool.submit(run, *connection.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
