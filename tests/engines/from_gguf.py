"""Writes tiny.gguf as a folder that vLLM and transformers load: the inverse of to_gguf.py, so that the model is committed once.

    python from_gguf.py tiny.gguf FOLDER

It needs the standard library alone, and knows what to_gguf.py writes: Qwen2, 32-bit floats, a byte-level BPE tokenizer.
"""

import json
import pathlib
import struct
import sys

ALIGNMENT = 32
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY, FLOAT32 = 8, 9, 0
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}


class Reader:
    """The values of a GGUF file, in order."""

    def __init__(self, content):
        self.content, self.at = content, 0

    def one(self, form):
        (value,) = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self):
        size = self.one("<Q")
        self.at += size
        return self.content[self.at - size:self.at].decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            of = self.one("<I")
            return [self.value(of) for _ in range(self.one("<Q"))]
        return self.one(FORMATS[kind])


def read(path):
    """Returns the metadata, and name, shape and bytes of each tensor."""
    reader = Reader(path.read_bytes())
    if reader.content[:4] != b"GGUF":
        raise SystemExit(f"{path} is no GGUF file")
    reader.at = 8
    tensors, pairs = reader.one("<Q"), reader.one("<Q")
    metadata = {}
    for _ in range(pairs):
        key = reader.string()
        metadata[key] = reader.value(reader.one("<I"))
    infos = []
    for _ in range(tensors):
        name, dimensions = reader.string(), reader.one("<I")
        # GGUF names the innermost dimension first.
        shape = [reader.one("<Q") for _ in range(dimensions)][::-1]
        kind, offset = reader.one("<I"), reader.one("<Q")
        if kind != FLOAT32:
            raise SystemExit(f"{name} has no 32-bit floats")
        infos.append((name, shape, offset))
    begin = -(-reader.at // ALIGNMENT) * ALIGNMENT
    return metadata, [(name, shape, reader.content[begin + offset:][:size(shape)]) for name, shape, offset in infos]


def size(shape):
    elements = 1
    for length in shape:
        elements *= length
    return 4 * elements


def weight_name(name):
    """`blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    return f"model.{OUTSIDE[parts[0]]}.{parts[1]}"


def safetensors(tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, content in tensors:
        header[weight_name(name)] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(content)]}
        offset += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(content for _, _, content in tensors)


def config(metadata):
    number = lambda key: metadata[f"qwen2.{key}"]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32", "hidden_act": "silu", "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": metadata["tokenizer.ggml.eos_token_id"], "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "hidden_size": number("embedding_length"), "intermediate_size": number("feed_forward_length"), "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"), "num_key_value_heads": number("attention.head_count_kv"),
        "max_position_embeddings": number("context_length"), "vocab_size": number("vocab_size"),
        # A 32-bit float is 9.999999974752427e-07 as a 64-bit one.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_parameters": {"rope_theta": number("rope.freq_base"), "rope_type": "default"},
        "attention_dropout": 0.0, "use_sliding_window": False,
    }


def tokenizer(metadata):
    names, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    is_added = lambda token: kinds[token] in (CONTROL, USER_DEFINED)
    added = [{"id": token, "content": names[token], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": kinds[token] == CONTROL} for token in range(len(names)) if is_added(token)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False,
            # The marks of tool calls are not in the vocabulary of BPE, the special tokens are.
            "vocab": {name: token for token, name in enumerate(names) if kinds[token] not in (USER_DEFINED, UNUSED)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def main():
    path, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    metadata, tensors = read(path)
    settings = config(metadata)
    names = metadata["tokenizer.ggml.tokens"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({key: settings[key] for key in ("eos_token_id", "pad_token_id")}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(metadata), ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": settings["max_position_embeddings"],
        "eos_token": names[settings["eos_token_id"]], "pad_token": names[settings["pad_token_id"]]}))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


if __name__ == "__main__":
    main()
