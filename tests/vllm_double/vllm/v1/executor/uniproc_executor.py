from . import Executor


class UniProcExecutor(Executor):
    pass
