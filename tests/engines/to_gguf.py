"""Writes a Qwen2 model as GGUF, the file of llama.cpp. No tier runs this script: it made the committed tiny.gguf.

    python to_gguf.py FOLDER OUTPUT.gguf      needs gguf, numpy and safetensors

FOLDER is that of make_model.py, or of from_gguf.py, which is the inverse: GGUF, folder, GGUF gives the same bytes.
"""

import json
import pathlib
import sys

import gguf
import numpy
from safetensors.numpy import load_file


def write_numbers(writer, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def write_tokenizer(writer, config, tokenizer, template):
    # The vocabulary is padded to a multiple of 64.
    names = [f"[PAD{token}]" for token in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * len(names)
    for name, token in tokenizer["model"]["vocab"].items():
        names[token], kinds[token] = name, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        names[added["id"]], kinds[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def write_weights(writer, config, weights):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, values in weights.items():
        # The output layer is that of the input.
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values.astype(numpy.float32))


def main():
    folder, output = pathlib.Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(output, "qwen2")
    write_numbers(writer, config)
    write_tokenizer(writer, config, tokenizer, (folder / "chat_template.jinja").read_text())
    write_weights(writer, config, load_file(folder / "model.safetensors"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
