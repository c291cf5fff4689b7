"""The messages of the protocol's gRPC service, as classes of protobuf.

The import of this module makes the classes from the table below. They have a descriptor pool of their own, so that they do
not conflict with the classes of a client in the same process. The table has maps as lists of entries, and enumerations as
numbers, because their bytes are the same.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "inference"
# Each line is a message. Each field has a type, a name and a number. A type with * is a list.
_TABLE = """
ServerLiveRequest
ServerLiveResponse: bool live 1
ServerReadyRequest
ServerReadyResponse: bool ready 1
ModelReadyRequest: string name 1, string version 2
ModelReadyResponse: bool ready 1
ServerMetadataRequest
ServerMetadataResponse: string name 1, string version 2, string* extensions 3
ModelMetadataRequest: string name 1, string version 2
TensorMetadata: string name 1, string datatype 2, int64* shape 3
ModelMetadataResponse: string name 1, string* versions 2, string platform 3, TensorMetadata* inputs 4, TensorMetadata* outputs 5
InferParameter: bool bool_param 1, int64 int64_param 2, string string_param 3, double double_param 4, uint64 uint64_param 5
ParametersEntry: string key 1, InferParameter value 2
InferTensorContents: bool* bool_contents 1, int32* int_contents 2, int64* int64_contents 3, uint32* uint_contents 4, uint64* uint64_contents 5, float* fp32_contents 6, double* fp64_contents 7, bytes* bytes_contents 8
InferInputTensor: string name 1, string datatype 2, int64* shape 3, ParametersEntry* parameters 4, InferTensorContents contents 5
InferRequestedOutputTensor: string name 1, ParametersEntry* parameters 2
ModelInferRequest: string model_name 1, string model_version 2, string id 3, ParametersEntry* parameters 4, InferInputTensor* inputs 5, InferRequestedOutputTensor* outputs 6, bytes* raw_input_contents 7
InferOutputTensor: string name 1, string datatype 2, int64* shape 3
ModelInferResponse: string model_name 1, string model_version 2, string id 3, ParametersEntry* parameters 4, InferOutputTensor* outputs 5, bytes* raw_output_contents 6
ModelStreamInferResponse: string error_message 1, ModelInferResponse infer_response 2
ModelConfigRequest: string name 1, string version 2
LatestVersions: uint32 num_versions 1
ModelVersionPolicy: LatestVersions latest 1
ModelTransactionPolicy: bool decoupled 1
ModelInput: string name 1, int32 data_type 2, int64* dims 4, bool optional 8
ModelOutput: string name 1, int32 data_type 2, int64* dims 3
ModelConfig: string name 1, string platform 2, ModelVersionPolicy version_policy 3, int32 max_batch_size 4, ModelInput* input 5, ModelOutput* output 6, string backend 17, ModelTransactionPolicy model_transaction_policy 19
ModelConfigResponse: ModelConfig config 1
ModelStatisticsRequest: string name 1, string version 2
StatisticDuration: uint64 count 1, uint64 ns 2
InferStatistics: StatisticDuration success 1, StatisticDuration fail 2, StatisticDuration queue 3, StatisticDuration compute_input 4, StatisticDuration compute_infer 5, StatisticDuration compute_output 6, StatisticDuration cache_hit 7, StatisticDuration cache_miss 8
ModelStatistics: string name 1, string version 2, uint64 last_inference 3, uint64 inference_count 4, uint64 execution_count 5, InferStatistics inference_stats 6
ModelStatisticsResponse: ModelStatistics* model_stats 1
ModelRepositoryParameter: bool bool_param 1, int64 int64_param 2, string string_param 3, bytes bytes_param 4
RepositoryEntry: string key 1, ModelRepositoryParameter value 2
RepositoryIndexRequest: string repository_name 1, bool ready 2
ModelIndex: string name 1, string version 2, string state 3, string reason 4
RepositoryIndexResponse: ModelIndex* models 1
RepositoryModelLoadRequest: string repository_name 1, string model_name 2, RepositoryEntry* parameters 3
RepositoryModelLoadResponse
RepositoryModelUnloadRequest: string repository_name 1, string model_name 2, RepositoryEntry* parameters 3
RepositoryModelUnloadResponse
"""


def _field(text: str) -> FieldDescriptorProto:
    kind, name, number = text.split()
    is_list, kind = kind.endswith("*"), kind.removesuffix("*")
    label = FieldDescriptorProto.LABEL_REPEATED if is_list else FieldDescriptorProto.LABEL_OPTIONAL
    found = FieldDescriptorProto(name=name, number=int(number), label=label)
    if kind[0].isupper():
        found.type, found.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        found.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    return found


def _message(line: str) -> DescriptorProto:
    name, _, fields = line.partition(":")
    return DescriptorProto(name=name, field=[_field(text) for text in fields.split(",") if text])


def _classes() -> dict[str, type[Message]]:
    messages = [_message(line) for line in _TABLE.split("\n") if line]
    pool = DescriptorPool()
    # Use proto2, where a field records whether it was sent. So a parameter that is false differs from a missing parameter.
    pool.AddSerializedFile(
        FileDescriptorProto(
            name="oip.proto", package=_PACKAGE, syntax="proto2", message_type=messages
        ).SerializeToString()
    )
    return {
        one.name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{one.name}")) for one in messages
    }


CLASSES = _classes()
"""The classes of the messages, by name."""


def message(kind: str, /, **fields: Any) -> Message:
    """Return a message. Nested messages are given as dicts."""
    return CLASSES[kind](**fields)


def parameters_of(entries: Any) -> dict[str, Any]:
    """Return the parameters of a request by name."""
    return {entry.key: next((value for _, value in entry.value.ListFields()), None) for entry in entries}
