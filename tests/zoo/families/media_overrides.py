"""Configuration fields of single vision and image-text types that the shrinking rules cannot know."""

from .sizes import EXPERTS, FEED_FORWARD, GRID, HEAD_DIM, HEADS, IMAGE, PATCH, WIDTH, WINDOW
from .text_overrides import MROPE, MROPE_HALF, QWEN4


def _in(sub: str, fields: dict) -> dict:
    return {f"{sub}.{name}": value for name, value in fields.items()}


_HALF = WIDTH // 2
_TEXT_MROPE = {"text_config.rope_parameters": MROPE}
_TEXT_MROPE_HALF = {"text_config.rope_parameters": MROPE_HALF}
_SWIN = {
    "embed_dim": _HALF,
    "depths": (1, 1),
    "num_heads": (2, HEADS),
    "window_size": 4,
    "patch_size": 4,
    "num_layers": 2,
}
_FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
_NECK = {"neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "out_indices": [2, 3, 4]}
_DETR_HEAD = {"decoder_in_channels": [WIDTH] * 3, "num_queries": 8}
_DETR = _in("backbone_config", _RESNET) | _DETR_HEAD | {"encoder_in_channels": [16, 32, 32]}
_HGNET = {
    "stage_in_channels": [48, 32, 32, 32],
    "stage_mid_channels": [16] * 4,
    "stage_out_channels": [32] * 4,
    "hidden_sizes": [32] * 4,
    "out_indices": [2, 3, 4],
}
_DETR_HG = _in("backbone_config", _HGNET) | _DETR_HEAD | {"encoder_in_channels": [32, 32, 32]}
_SAM = {
    "vision_config.output_channels": WIDTH,
    "vision_config.num_pos_feats": WIDTH // 2,
    "vision_config.mlp_dim": FEED_FORWARD,
    "vision_config.window_size": 2,
    "vision_config.global_attn_indexes": [1],
    "prompt_encoder_config.image_embedding_size": GRID,
    "mask_decoder_config.mlp_dim": FEED_FORWARD,
}
_IMAGE_CODES = {"<image>": 98} | {
    "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z": 61 + code for code in range(32)
}
_VQ = {"base_channels": 32, "num_embeddings": 32, "latent_channels": 32, "embed_dim": 32, "channel_multiplier": [1, 1]}
_OMNI_TOKENS = {
    "vision_start_token_id": 80,
    "vision_end_token_id": 81,
    "audio_start_token_id": 82,
    "audio_end_token_id": 83,
}

MEDIA_OVERRIDES: dict[str, dict] = {
    **{
        name: _TEXT_MROPE
        for name in """qwen3_vl qwen3_vl_moe cosmos3_edge cosmos3_omni glm46v glm4v glm_ocr glmga hunyuan_vl
        paddleocr_vl""".split()
    },
    "swin": _SWIN,
    "swinv2": _SWIN,
    "swin2sr": {**_SWIN, "embed_dim": WIDTH, "num_heads": (HEADS, HEADS), "patch_size": 1, "image_size": IMAGE},
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "qwen2_vl": {**_TEXT_MROPE, "vision_config.embed_dim": WIDTH},
    "qwen2_5_vl": {
        **_TEXT_MROPE,
        "vision_config.window_size": 2 * PATCH,
        "vision_config.fullatt_block_indexes": [1],
        "vision_config.out_hidden_size": WIDTH,
    },
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": MROPE, "sliding_attention": MROPE}},
    "glm4v_moe": _TEXT_MROPE_HALF,
    "florence2": {
        "vision_config.depths": (1, 1),
        "vision_config.patch_size": (7, 3),
        "vision_config.patch_stride": (4, 2),
        "vision_config.patch_padding": (3, 1),
        "vision_config.patch_prenorm": (False, True),
        "vision_config.embed_dim": (_HALF, WIDTH),
        "vision_config.num_heads": (2, HEADS),
        "vision_config.num_groups": (2, HEADS),
        "vision_config.window_size": 4,
    },
    "janus": {
        "vq_config.base_channels": 32,
        "vq_config.num_embeddings": 32,
        "vq_config.latent_channels": 32,
        "vision_config.num_image_tokens": 16,
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "gpt2"},
        "decoder.is_decoder": True,
        "decoder.add_cross_attention": True,
    },
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": {"model_type": "bert"},
        "decoder.is_decoder": True,
        "decoder.add_cross_attention": True,
    },
    "vision-text-dual-encoder": {
        "vision_config": {"model_type": "vit"},
        "text_config": {"model_type": "bert"},
        "vision_config.pooler_output_size": WIDTH,
    },
    "glm5_next": {
        "text_config.qk_rope_head_dim": 0,
        "text_config.linear_head_dim": HEAD_DIM,
        "text_config.linear_num_heads": HEADS,
        "text_config.index_topk": 8,
        "text_config.index_kpool": 2,
    },
    "qwen4_exp": _in("text_config", QWEN4),
    "ernie4_5_vl_moe": {**_TEXT_MROPE, "text_config.moe_intermediate_size": [_HALF, _HALF]},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0, "mm_tokens_per_image": 4},
    "depth_anything": _in("backbone_config", _FOUR_LAYERS)
    | _NECK
    | {"reassemble_hidden_size": WIDTH, "patch_size": PATCH},
    "prompt_depth_anything": _in("backbone_config", _FOUR_LAYERS)
    | _NECK
    | {"reassemble_hidden_size": WIDTH, "patch_size": PATCH},
    "chmv2": _in("backbone_config", _FOUR_LAYERS)
    | {
        "post_process_channels": [16] * 4,
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
        "number_output_channels": 16,
    },
    "tipsv2_dpt": _in("backbone_config", _FOUR_LAYERS) | _NECK,
    "zoedepth": _in("backbone_config", _FOUR_LAYERS) | _NECK | {"bottleneck_features": 16, "bin_embedding_dim": 16},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], **_NECK},
    "rt_detr": _DETR,
    "rt_detr_v2": _DETR,
    "d_fine": _DETR_HG,
    "sam": _SAM,
    "sam_hq": _SAM | {"mask_decoder_config.vit_dim": WIDTH},
    "videomae": {"num_frames": 2, "tubelet_size": 2},
    "vivit": {"num_frames": 2, "tubelet_size": (2, PATCH, PATCH)},
    "timesformer": {"num_frames": 2},
    "xclip": {
        "vision_config.num_frames": 2,
        "vision_config.mit_hidden_size": WIDTH,
        "vision_config.mit_num_attention_heads": HEADS,
        "prompt_num_attention_heads": HEADS,
    },
    "vjepa2": {
        "frames_per_clip": 4,
        "crop_size": IMAGE,
        "pred_hidden_size": WIDTH,
        "pred_num_attention_heads": HEADS,
        "pred_num_hidden_layers": 2,
        "pred_num_mask_tokens": 2,
    },
    "siglip2": {"vision_config.num_patches": GRID * GRID},
    "aria": {"projector_patch_to_query_dict": {GRID * GRID: 4}},
    "blip-2": {"image_token_index": 98, "num_query_tokens": 4},
    "instructblip": {"image_token_index": 98, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 98, "num_query_tokens": 4},
    "chameleon": {"vocabulary_map": _IMAGE_CODES, **_in("vq_config", _VQ)},
    "llava_next": {"image_grid_pinpoints": [[IMAGE, IMAGE]]},
    "llava_next_video": {"image_grid_pinpoints": [[IMAGE, IMAGE]]},
    "llava_onevision": {"image_grid_pinpoints": [[IMAGE, IMAGE]]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llama4": {
        "vision_config.vision_output_dim": WIDTH,
        "vision_config.projector_input_dim": WIDTH,
        "vision_config.projector_output_dim": WIDTH,
        "vision_config.intermediate_size": 4 * WIDTH,
        "text_config.intermediate_size_mlp": FEED_FORWARD,
    },
    "mllama": {
        "vision_config.num_global_layers": 1,
        "vision_config.attention_heads": HEADS,
        "vision_config.max_num_tiles": 1,
        "vision_config.supported_aspect_ratios": [[1, 1]],
        "vision_config.intermediate_layers_indices": [0],
        "vision_config.vision_output_dim": 2 * WIDTH,
        "text_config.cross_attention_layers": [1],
    },
    "pix2struct": {"vision_config.patch_embed_hidden_size": 3 * PATCH * PATCH, "vision_config.seq_len": GRID * GRID},
    "step3p7": {"text_config.sliding_window": WINDOW},
    "qwen2_5_omni_thinker": {
        **_TEXT_MROPE,
        **_OMNI_TOKENS,
        "audio_config.output_dim": WIDTH,
        "audio_config.n_window": 8,
        "audio_config.max_source_positions": 64,
        "vision_config.window_size": 2 * PATCH,
        "vision_config.fullatt_block_indexes": [1],
    },
    "qwen3_omni_moe_thinker": {
        **_TEXT_MROPE,
        **_OMNI_TOKENS,
        "audio_config.output_dim": WIDTH,
        "audio_config.downsample_hidden_size": 16,
        "vision_config.deepstack_visual_indexes": [0],
    },
    "deepseek_ocr2": {
        "text_config.num_experts_per_tok": EXPERTS,
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.sam_config.downsample_channels": [WIDTH, WIDTH],
    },
    "diffusion_gemma": {
        "vision_config": {"model_type": "gemma4_vision"},
        "text_config.num_experts": EXPERTS,
        "text_config.top_k_experts": EXPERTS,
        "text_config.moe_intermediate_size": _HALF,
        "canvas_length": 8,
    },
    "emu3": {
        "vocabulary_map": {"<image>": 98},
        **_in(
            "vq_config", {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 32}
        ),
    },
    "kosmos-2": {"latent_query_num": 4},
    "rf_detr": {"num_queries": 4, "group_detr": 1},
    "seggpt": {"image_size": [2 * IMAGE, IMAGE]},
}
