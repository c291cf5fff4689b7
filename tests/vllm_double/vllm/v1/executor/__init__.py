class Executor:
    @staticmethod
    def get_class(vllm_config):
        return vllm_config.parallel_config.distributed_executor_backend
