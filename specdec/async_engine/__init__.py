"""An engine in a process of its own, and the asynchronous API to it. Needs pyzmq and msgspec (the extra `serve`)."""

from importlib.util import find_spec

if missing := [package for package, module in {"pyzmq": "zmq", "msgspec": "msgspec"}.items() if not find_spec(module)]:
    raise ImportError(f"AsyncLLM needs {' and '.join(missing)}; install what is missing: pip install 'specdec[serve]'")
