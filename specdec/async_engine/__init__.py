"""An engine in a process of its own, and the asynchronous API to it. Needs pyzmq and msgspec (the extra `serve`)."""

from specdec.kernels.types.extras import lacking

if problem := lacking("AsyncLLM", "serve", {"zmq": "pyzmq", "msgspec": "msgspec"}):
    raise ImportError(problem)
