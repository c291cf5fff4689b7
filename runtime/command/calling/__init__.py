"""The clients for Python programs: `pilotflame.Client` and `pilotflame.AsyncClient`.

Start reading at `async_client.py`, which does the work. `sync_client.py` runs it on an event loop in a thread. No other
module of pilotflame imports this room: a worker must not load it.
"""
