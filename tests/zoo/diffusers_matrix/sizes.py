"""The numbers that tiny models are made of. Constructor arguments are shrunk by their name alone."""

BATCH = 2
LAYERS = 2
HEADS = 2
HEAD_DIM = 32
WIDTH = HEADS * HEAD_DIM
TEXT = 32  # width of text features
TEXT_LENGTH = 16
CHANNELS = 4  # of images and videos; token models take TOKEN_CHANNELS
SIDE = 16  # of an image, in pixels of the latent
FRAMES = 2
GRID = 6  # a token model's image is GRID x GRID tokens
TOKENS = GRID * GRID

_NAMES_BY_VALUE = (
    (
        LAYERS,
        """num_layers num_hidden_layers n_layers num_single_layers num_mmdit_layers num_single_dit_layers depth
        dit_depth nlayers mmdit_layers perceiver_num_layers transformer_num_layers num_visual_blocks LFE_depth""",
    ),
    (
        1,
        """n_refiner_layers num_refiner_layers num_text_blocks num_layerwise_text_blocks num_refiner_text_blocks
        layers_per_block num_decoder_layers approximator_layers num_res_blocks motion_layers_per_block
        motion_mid_block_layers_per_block LFE_num_querie""",
    ),
    (
        HEADS,
        """num_attention_heads n_heads num_heads num_key_value_heads num_kv_heads n_kv_heads dit_heads nheads
        audio_num_attention_heads num_cross_attention_heads text_num_attention_heads text_num_key_value_heads
        num_key_value_attention_heads cross_attn_num_heads LFE_num_heads face_encoder_num_heads block_num_heads
        motion_num_attention_heads""",
    ),
    (
        HEAD_DIM,
        """attention_head_dim head_dim audio_attention_head_dim cross_attention_head_dim linear_head_dim
        cross_attn_dim_head LFE_dim_head rotary_dim""",
    ),
    (
        WIDTH,
        """hidden_size dim model_dim embed_dim dit_dim token_dim caption_projection_dim intermediate_size ffn_dim
        ff_inner_dim ffn_hidden_size ff_dim text_intermediate_size moe_intermediate_dim face_encoder_hidden_dim
        approximator_hidden_dim ff_inner_dim audio_cross_attention_dim d_model d_ff LFE_output_dim
        img_context_dim_out model_channels block_out_channels_width""",
    ),
    (
        TEXT,
        """text_dim text_embed_dim joint_attention_dim caption_channels text_in_dim cap_feat_dim encoder_hid_dim
        in_text_dim text_hidden_dim context_in_dim llm_features_dim dit_text_dim condition_dim text_encoder_dim
        pooled_projection_dim in_text_dim2 freq_dim time_embed_dim time_dim timestep_embed_dim adaln_dim
        adaln_lora_dim timestep_guidance_channels timestep_channels cond_token_dim global_cond_dim time_proj_dim
        timestep_features_dim crossattn_proj_in_channels text_emb_dim time_step_dim cross_attention_dim_t5
        text_embed_2_dim_width global_states_input_dim cross_attention_input_dim encoder_hidden_size cond_embed_dim
        image_embed_dim image_proj_dim LFE_id_dim LFE_vit_dim fourier_embedding_dim time_embed_hidden_dim
        encoder_hidden_states_channels dim_cond pair_repr_dim t_emb_dim timestep_ratio_embedding_dim
        conditioning_dim micro_cond_encode_dim""",
    ),
    (8, "norm_num_groups groups max_norm_num_groups ctrl_max_norm_num_groups motion_norm_num_groups"),
    (SIDE, "sample_size sample_width sample_height image_size"),
    (32, "pos_embed_max_size rope_max_seq_len max_seq_len multiple_of"),
    (TEXT_LENGTH, "text_len text_len_t5 max_text_seq_length max_sequence_length num_embeddings"),
)
TINY = {name: value for value, names in _NAMES_BY_VALUE for name in names.split()}

# Rotary axes must add up to HEAD_DIM; how many there are is the model's.
ROTARY_AXES = {1: (32,), 2: (16, 16), 3: (8, 12, 12), 4: (8, 8, 8, 8)}
ROTARY_NAMES = "axes_dims_rope axes_dims rope_axes_dim axes_dim_rope rope_dim_list rope_dim".split()
