def get_model_architecture(model_config):
    from ...v1.engine.core import Model

    return Model, "Model"
