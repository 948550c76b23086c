"""Turn the default configuration of any model type into a tiny one, by field name alone.

A field is shrunk because of what it is called, in every sub configuration alike; a model type needs an
entry in the override table only where its names mislead or its fields constrain each other.
"""

import copy

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .sizes import (
    EXPERTS,
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    IMAGE,
    LAYERS,
    LENGTH,
    MELS,
    PATCH,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    WINDOW,
)

_NAMES_BY_VALUE = (
    (
        WIDTH,
        """hidden_size d_model n_embd embed_dim embedding_size hidden_dim encoder_hidden_size decoder_hidden_size
        d_embed emb_dim hidden_sizes_last projection_dim vision_hidden_size text_hidden_size model_dim
        rnn_hidden_size lru_width cross_attention_hidden_size encoder_hidden_dim decoder_hidden_dim
        word_embed_proj_dim conformer_hidden_size out_hidden_size mm_hidden_size project_dim projection_size
        embedding_dim vision_feature_dim share_hidden_size projection_hidden_size embed_proj_dim d_text d_vision
        vocoder_hidden_size output_dim projector_hidden_size""",
    ),
    (
        FEED_FORWARD,
        """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner inner_dim ffn_hidden_size
        ffn_intermediate_size d_inner feed_forward_size dim_feedforward feedforward_dim feed_forward_proj_dim
        encoder_intermediate_size decoder_intermediate_size moe_dense_intermediate_size dense_intermediate_size""",
    ),
    (
        WIDTH // 2,
        """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size expert_dim
        shared_intermediate_size moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank index_head_dim
        o_lora_rank""",
    ),
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth
        num_decoder_layers num_layers_enc n_layer_enc vision_layers encoder_num_hidden_layers
        decoder_num_hidden_layers encoder_num_layers decoder_num_layers num_blocks layers num_block_layers
        num_hidden_groups speech_encoder_layers adapter_num_layers num_adapter_layers""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        encoder_num_attention_heads decoder_num_attention_heads vision_heads attention_heads
        speech_encoder_attention_heads index_n_heads""",
    ),
    (
        HEAD_DIM,
        "head_dim d_kv qk_nope_head_dim v_head_dim attention_head_dim attention_head_size global_head_dim swa_head_dim",
    ),
    (HEAD_DIM // 2, "qk_rope_head_dim rotary_dim"),
    (
        VOCABULARY,
        """vocab_size text_vocab_size encoder_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size
        vocab_size_per_layer_input""",
    ),
    (
        POSITIONS,
        """max_position_embeddings n_positions max_target_positions n_ctx max_seq_len max_sequence_length
        max_seq_length original_max_position_embeddings encoder_max_position_embeddings
        decoder_max_position_embeddings text_max_position_embeddings""",
    ),
    (LENGTH, "max_source_positions"),
    (IMAGE, "image_size img_size input_size"),
    (PATCH, "patch_size"),
    (MELS, "num_mel_bins n_mels num_mels feature_size num_mel_channels input_feat_per_channel"),
    (
        EXPERTS,
        """num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts n_experts
        num_experts_per_tok moe_k moe_topk moe_top_k top_k_experts num_experts_per_token experts_per_token
        num_selected_experts""",
    ),
    (
        1,
        """n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace num_nextn_predict_layers
        moe_num_shared_experts expert_capacity_groups""",
    ),
    (
        WINDOW,
        "sliding_window index_topk attention_chunk_size attention_window_size local_window_size window_size_attention",
    ),
)
TINY = {name: value for value, names in _NAMES_BY_VALUE for name in names.split()}
"""Field name -> tiny value. All experts are chosen for each token: routing then cannot flip on a rounding error."""

_FIXED_TOKENS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "cls": 1, "sep": 2, "mask": 3, "unk": 4}
FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN = 5, 60
"""Token ids that mean nothing special in any tiny model: random text is drawn from this range."""


def tiny_config(model_type: str, overrides: dict, config_class=None):
    """The tiny configuration of a model type; `overrides` maps dotted field paths to values."""
    config_class = config_class or CONFIG_MAPPING[model_type]
    tokens: dict[str, int] = {}
    values = _tiny_values(config_class(**_required(overrides)), overrides, tokens)
    return config_class(**values)


def _required(overrides: dict) -> dict:
    """Sub configurations that the type lacks by default or refuses to be built without."""
    return {path: _default_dict(value) for path, value in overrides.items() if _is_model_type(value)}


def _is_model_type(value) -> bool:
    return isinstance(value, dict) and list(value) == ["model_type"]


def _default_dict(value: dict) -> dict:
    return CONFIG_MAPPING[value["model_type"]]().to_dict()


def _tiny_values(config, overrides: dict, tokens: dict[str, int]) -> dict:
    """Constructor arguments that shrink `config`; `tokens` keeps special tokens equal across sub configurations."""
    values = {}
    for name, value in list(vars(config).items()):
        nested = {path[len(name) + 1 :]: v for path, v in overrides.items() if path.startswith(name + ".")}
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            values[name] = {**_chosen(value), **_tiny_values(value, nested, tokens), "model_type": value.model_type}
        elif name.startswith("_") or name in ("rope_parameters", "rope_scaling", "dtype", "transformers_version"):
            continue
        else:
            tiny = _tiny_field(config, name, value, tokens)
            if tiny is not None:
                values[name] = tiny
    _shorten_layer_lists(config, values)
    direct = {path: value for path, value in overrides.items() if "." not in path and not _is_model_type(value)}
    values.update(copy.deepcopy(direct))
    return values


def _chosen(config) -> dict:
    """Flags and numbers that the parent of a sub configuration chose against the defaults of its class."""
    skipped = ("model_type", "head_dim")
    different = config.to_diff_dict().items()
    return {name: v for name, v in different if isinstance(v, (bool, str, int, float)) and name not in skipped}


def _tiny_field(config, name: str, value, tokens: dict[str, int]):
    """The tiny value of one field, or None to leave it to the constructor."""
    if name == "head_dim" and hasattr(config, "qk_rope_head_dim"):
        return None  # derived from the parts of latent attention
    if name.endswith(("token_id", "token_index", "token_ids", "_token")) and value is not None:
        return _token(name, value, tokens)
    if name == "head_dim" and value is None:
        return HEAD_DIM
    if isinstance(value, bool) or value is None:
        return None
    if name.endswith(("dropout", "drop_rate", "layerdrop", "drop_path_rate", "_pdrop", "dropout_rate", "dropout_prob")):
        return 0.0 if isinstance(value, float) else None
    if name in ("num_key_value_heads", "n_kv_heads", "num_kv_heads"):
        return _key_value_heads(config, value)
    if name in TINY and isinstance(value, int):
        return TINY[name]
    if name in ("image_size", "patch_size") and isinstance(value, (list, tuple)) and len(value) == 2:
        return type(value)([TINY[name]] * 2)
    return None


def _key_value_heads(config, value: int):
    """Keep the kind of head sharing the type ships with: none, groups, or one head for all."""
    if value == getattr(config, "num_attention_heads", None):
        return HEADS
    return value if value == 1 else HEADS // 2


def _token(name: str, value, tokens: dict[str, int]):
    """A small id for a special token, the same for the same name and distinct between names."""
    if isinstance(value, (list, tuple)):
        return [_token(name.removesuffix("s"), 0, tokens)] if all(type(item) is int for item in value) else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    stem = name.removesuffix("_token_id").removesuffix("_token_index").removesuffix("_token")
    if stem in _FIXED_TOKENS:
        return _FIXED_TOKENS[stem]
    return tokens.setdefault(stem, VOCABULARY - 1 - len(tokens))


def _shorten_layer_lists(config, values: dict) -> None:
    """Keep one layer of each type (two at least) where a list names the type of each layer."""
    kinds = vars(config).get("layer_types")
    if not isinstance(kinds, list) or not kinds or not isinstance(kinds[0], str):
        return
    distinct = list(dict.fromkeys(kinds))
    kept = distinct if len(distinct) >= LAYERS else distinct * LAYERS
    values["layer_types"] = kept
    for count in ("num_hidden_layers", "num_layers"):
        if count in values:
            values[count] = len(kept)
