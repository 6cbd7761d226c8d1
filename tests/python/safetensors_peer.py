#!/usr/bin/env python3
"""The reference implementation of the safetensors format reads a file of ours, says what it saw, and writes it anew.

usage: safetensors_peer.py IN OUT       with the interpreter that .ci/python-safetensors prints

Prints one JSON object: each tensor's name with its dtype, shape, and elements as numbers. OUT is what the library's own writer makes
of the same arrays.
"""

import json
import math
import sys

import ml_dtypes
import numpy
import safetensors
from safetensors.numpy import save_file

TYPES = {
    "BOOL": numpy.bool_, "U8": numpy.uint8, "I8": numpy.int8, "U16": numpy.uint16, "I16": numpy.int16,
    "U32": numpy.uint32, "I32": numpy.int32, "U64": numpy.uint64, "I64": numpy.int64,
    "F16": numpy.float16, "BF16": ml_dtypes.bfloat16, "F32": numpy.float32, "F64": numpy.float64,
}


def number(element):
    """A number that JSON has: bools and integers as integers; what is not finite as its name."""
    value = element.item() if hasattr(element, "item") else element
    value = float(element) if not isinstance(value, (bool, int, float)) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main(source, target):
    with open(source, "rb") as file:
        tensors = safetensors.deserialize(file.read())
    with safetensors.safe_open(source, framework="numpy") as file:
        metadata = file.metadata()
    seen, arrays = {}, {}
    for name, tensor in tensors:
        array = numpy.frombuffer(tensor["data"], dtype=TYPES[tensor["dtype"]]).reshape(tensor["shape"])
        seen[name] = {
            "dtype": tensor["dtype"],
            "shape": list(tensor["shape"]),
            "elements": [number(element) for element in array.reshape(-1)],
        }
        arrays[name] = array
    save_file(arrays, target, metadata=metadata)
    print(json.dumps(seen))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
