import multiprocessing
import os


def get_mp_context():
    return multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
