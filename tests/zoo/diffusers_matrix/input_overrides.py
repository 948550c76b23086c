"""What single classes are fed beyond what their argument names say.

The specs are read by feed.py: a tuple of numbers is noise of that shape, a tuple that starts with a word is another
kind of tensor, everything else is passed as it is, and None leaves the argument out.
"""

from .sizes import BATCH, CHANNELS, FRAMES, GRID, SIDE, TEXT, TEXT_LENGTH, TOKENS, WIDTH

_TEXT = (BATCH, TEXT_LENGTH, TEXT)
_TEXT_MASK = ("mask", BATCH, TEXT_LENGTH)
_VIDEO_TOKENS = FRAMES * TOKENS
_COG_INPUTS = dict(hidden_states=(BATCH, FRAMES, CHANNELS, SIDE, SIDE))
_COGVIEW_INPUTS = {name: ("float", BATCH, 2) for name in ("original_size", "target_size", "crop_coords")}
_ANYFLOW_INPUTS = dict(
    hidden_states=(BATCH, FRAMES, 16, SIDE, SIDE),
    r_timestep=("float", BATCH, FRAMES),
    timestep=("float", BATCH, FRAMES),
)
_HUNYUAN_DIT_INPUTS = dict(
    encoder_hidden_states=_TEXT,
    text_embedding_mask=_TEXT_MASK,
    encoder_hidden_states_t5=_TEXT,
    text_embedding_mask_t5=_TEXT_MASK,
    image_rotary_emb=("pair", (SIDE // 2) ** 2, 32),
)

INPUTS: dict[str, dict] = {
    "AceStepTransformer1DModel": dict(
        hidden_states=(BATCH, TOKENS, CHANNELS),
        timestep_r=("float", BATCH),
        context_latents=(BATCH, TOKENS, 8),
        encoder_hidden_states=(BATCH, TEXT_LENGTH, WIDTH),
    ),
    "AnyFlowFARTransformer3DModel": _ANYFLOW_INPUTS | dict(chunk_partition=[1, 1]),
    "AnyFlowTransformer3DModel": _ANYFLOW_INPUTS,
    "BriaFibo2Transformer2DModel": dict(encoder_hidden_states=(BATCH, 2, TEXT_LENGTH, TEXT)),
    "BriaFiboTransformer2DModel": dict(text_encoder_layers=("list", *[(BATCH, TEXT_LENGTH, TEXT)] * 4)),
    "CogVideoXTransformer3DModel": _COG_INPUTS,
    "ConsisIDTransformer3DModel": _COG_INPUTS,
    "CogView3PlusTransformer2DModel": _COGVIEW_INPUTS,
    "CogView4Transformer2DModel": _COGVIEW_INPUTS,
    "ControlNetModel": dict(conditioning_scale=1.0),
    "ControlNetUnionModel": dict(
        controlnet_cond=("list", (BATCH, CHANNELS, SIDE, SIDE)),
        control_type=("ones", BATCH, 6),
        control_type_idx=[0],
        added_cond_kwargs=("dict", dict(text_embeds=(BATCH, TEXT), time_ids=("float", BATCH, 6))),
    ),
    "CosmosControlNetModel": dict(
        controls_latents=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        latents=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        condition_mask=("ones", BATCH, 1, FRAMES, SIDE, SIDE),
    ),
    "DiTTransformer2DModel": dict(class_labels=("ids", 10, BATCH), timestep=("ids", 10, BATCH)),
    "DreamLiteTransformer2DModel": dict(hidden_states=(BATCH, 32, SIDE, SIDE)),
    "Transformer2DModel": dict(hidden_states=(BATCH, 32, SIDE, SIDE), encoder_attention_mask=_TEXT_MASK),
    "ErnieImageTransformer2DModel": dict(text_bth=_TEXT, text_lens=("lengths", TEXT_LENGTH, 9)),
    "Flux2Transformer2DModel": dict(
        img_ids=("float", TOKENS, 4), txt_ids=("float", TEXT_LENGTH, 4), guidance=("float", BATCH)
    ),
    "Flux3Transformer2DModel": dict(img_ids=("float", TOKENS, 4), txt_ids=("float", TEXT_LENGTH, 4)),
    "FluxMultiControlNetModel": dict(
        hidden_states=(BATCH, TOKENS, 64),
        controlnet_cond=("list", *[(BATCH, TOKENS, 64)] * 2),
        controlnet_mode=("list", *[("ids", 1, BATCH)] * 2),
        conditioning_scale=[1.0, 1.0],
        pooled_projections=(BATCH, TEXT),
    ),
    "GlmImageTransformer2DModel": _COGVIEW_INPUTS
    | dict(
        prior_token_id=("ids", 16, BATCH, (SIDE // 2) ** 2),
        prior_token_drop=("bools", BATCH, (SIDE // 2) ** 2),
        original_size=None,
    ),
    "HiDreamImageTransformer2DModel": dict(
        hidden_states=(BATCH, CHANNELS, SIDE, SIDE),
        img_ids=None,
        timesteps=("float", BATCH),
        encoder_hidden_states_t5=_TEXT,
        pooled_embeds=(BATCH, TEXT),
        encoder_hidden_states_llama3=(4, BATCH, TEXT_LENGTH, TEXT),
    ),
    "HunyuanDiT2DControlNetModel": _HUNYUAN_DIT_INPUTS,
    "HunyuanDiT2DModel": _HUNYUAN_DIT_INPUTS,
    "HunyuanDiT2DMultiControlNetModel": _HUNYUAN_DIT_INPUTS
    | dict(
        hidden_states=(BATCH, CHANNELS, SIDE, SIDE),
        controlnet_cond=("list", *[(BATCH, CHANNELS, SIDE, SIDE)] * 2),
        conditioning_scale=[1.0, 1.0],
    ),
    "HunyuanVideo15Transformer3DModel": dict(
        encoder_hidden_states_2=_TEXT,
        encoder_attention_mask_2=_TEXT_MASK,
        image_embeds=(BATCH, 5, TEXT),
    ),
    "HunyuanVideoTransformer3DModel": dict(guidance=("float", BATCH)),
    "HunyuanVideoFramepackTransformer3DModel": dict(
        guidance=("float", BATCH),
        image_embeds=(BATCH, 5, TEXT),
        indices_latents=("arange", FRAMES),
        latents_clean=(BATCH, 16, 1, SIDE, SIDE),
        indices_latents_clean=("arange", 1),
        latents_history_2x=(BATCH, 16, 2, SIDE, SIDE),
        indices_latents_history_2x=("arange", 2),
        latents_history_4x=(BATCH, 16, 4, SIDE, SIDE),
        indices_latents_history_4x=("arange", 4),
    ),
    "I2VGenXLUNet": dict(
        sample=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        fps=("ids", 8, BATCH),
        image_latents=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        image_embeddings=(BATCH, TEXT),
    ),
    "Ideogram4Transformer2DModel": dict(
        hidden_states=(BATCH, TOKENS, CHANNELS),
        encoder_hidden_states=(BATCH, TOKENS, TEXT),
        position_ids=("ids", 8, BATCH, TOKENS, 3),
        segment_ids=("ids", 2, BATCH, TOKENS),
        indicator=("ids", 4, BATCH, TOKENS),
    ),
    "JoyImageEditPlusTransformer3DModel": dict(
        hidden_states=(BATCH, TOKENS, 16, 1, 2, 2),
        shape_list=[[(1, GRID, GRID)]] * BATCH,
    ),
    "Kandinsky5Transformer3DModel": dict(
        hidden_states=(BATCH, FRAMES, SIDE, SIDE, CHANNELS),
        visual_rope_pos=("aranges", FRAMES, SIDE // 2, SIDE // 2),
        text_rope_pos=("arange", TEXT_LENGTH),
    ),
    "Kandinsky6Transformer3DModel": dict(hidden_states=(1, FRAMES, SIDE, SIDE, 16)),
    "Kandinsky6SRTransformer3DModel": dict(hidden_states=(1, FRAMES, SIDE, SIDE, 129)),
    "Krea2Transformer2DModel": dict(
        hidden_states=(BATCH, TOKENS, 64),
        encoder_hidden_states=(BATCH, TEXT_LENGTH, 3, TEXT),
        position_ids=("float", TEXT_LENGTH + TOKENS, 3),
    ),
    "LTX2VideoTransformer3DModel": dict(
        hidden_states=(BATCH, _VIDEO_TOKENS, CHANNELS),
        audio_hidden_states=(BATCH, 8, CHANNELS),
        audio_encoder_hidden_states=_TEXT,
        audio_encoder_attention_mask=_TEXT_MASK,
        num_frames=FRAMES,
        height=GRID,
        width=GRID,
        audio_num_frames=8,
    ),
    "LTXVideoTransformer3DModel": dict(
        hidden_states=(BATCH, _VIDEO_TOKENS, CHANNELS), num_frames=FRAMES, height=GRID, width=GRID
    ),
    "LongCatAudioDiTTransformer": dict(hidden_states=(BATCH, TOKENS, 64), latent_cond=(BATCH, TOKENS, 64)),
    "LatteTransformer3DModel": dict(encoder_attention_mask=None),
    "LuminaNextDiT2DModel": dict(cross_attention_kwargs={}, image_rotary_emb=("complex", 384, 384, 16)),
    "MiniMaxH3Transformer3DModel": dict(
        hidden_states=(BATCH, 20, 4 * CHANNELS),
        audio_hidden_states=(BATCH, 6, CHANNELS),
        encoder_hidden_states=(BATCH, 10, TEXT),
        timestep=("float", 1),
        timestep_indices=("ids", 1, 36),
        token_tags=("ids", 3, 36),
        position_ids=("ids", 8, 36, 3),
        video_indices=("arange", 20),
        audio_indices=("arange", 20, 26),
        text_indices=("arange", 26, 36),
    ),
    "MiniMaxMusic3RVQDepthDecoder": dict(inputs_embeds=(BATCH, 8, WIDTH)),
    "MiniMaxMusic3Transformer1DModel": dict(encoder_hidden_states=(BATCH, TOKENS, TEXT)),
    "MultiControlNetModel": dict(
        encoder_hidden_states=_TEXT,
        controlnet_cond=("list", *[(BATCH, CHANNELS, SIDE, SIDE)] * 2),
        conditioning_scale=[1.0, 1.0],
    ),
    "MultiControlNetUnionModel": dict(
        encoder_hidden_states=_TEXT,
        controlnet_cond=("list", *[("list", (BATCH, CHANNELS, SIDE, SIDE))] * 2),
        conditioning_scale=[1.0, 1.0],
        control_type=("list", *[("ones", BATCH, 6)] * 2),
        control_type_idx=[[0], [0]],
        added_cond_kwargs=("dict", dict(text_embeds=(BATCH, TEXT), time_ids=("float", BATCH, 6))),
    ),
    "OmniGenTransformer2DModel": dict(
        input_ids=("ids", 60, BATCH, TEXT_LENGTH),
        input_img_latents=[],
        input_image_sizes={},
        timestep=("float", BATCH),
        attention_mask=("ones", BATCH, TEXT_LENGTH + 1 + (SIDE // 2) ** 2, TEXT_LENGTH + 1 + (SIDE // 2) ** 2),
        position_ids=("ids", 8, BATCH, TEXT_LENGTH + 1 + (SIDE // 2) ** 2),
    ),
    "PriorTransformer": dict(
        hidden_states=(BATCH, TEXT),
        proj_embedding=(BATCH, TEXT),
        encoder_hidden_states=(BATCH, TEXT_LENGTH, TEXT),
        attention_mask=_TEXT_MASK,
    ),
    "QwenImage21Transformer2DModel": dict(img_mask=("tail", BATCH, TEXT_LENGTH + TOKENS // 4, TOKENS // 4)),
    "QwenImageMultiControlNetModel": dict(
        hidden_states=(BATCH, TOKENS, 64),
        controlnet_cond=("list", (BATCH, TOKENS, 64)),
        conditioning_scale=[1.0],
    ),
    "SD3MultiControlNetModel": dict(
        hidden_states=(BATCH, 16, SIDE, SIDE),
        controlnet_cond=("list", *[(BATCH, 16, SIDE, SIDE)] * 2),
        conditioning_scale=[1.0, 1.0],
        pooled_projections=(BATCH, TEXT),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": dict(
        hidden_states=(BATCH, _VIDEO_TOKENS, CHANNELS), video_rotary_emb=("pair", BATCH, _VIDEO_TOKENS, WIDTH)
    ),
    "SanaWMTransformer3DModel": dict(
        timestep=("float", BATCH, 1, FRAMES),
        hidden_states=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        encoder_hidden_states=(BATCH, 1, TEXT_LENGTH, TEXT),
    ),
    "SparseControlNetModel": dict(
        sample=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        controlnet_cond=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        conditioning_mask=("ones", BATCH, 1, FRAMES, SIDE, SIDE),
        encoder_hidden_states=(BATCH * FRAMES, TEXT_LENGTH, TEXT),
    ),
    "StableAudio3DiTModel": dict(
        hidden_states=(BATCH, 8, TOKENS),
        global_hidden_states=(BATCH, TEXT),
        local_add_cond=(BATCH, 5, TOKENS),
        encoder_hidden_states=_TEXT,
    ),
    "StableAudioDiTModel": dict(
        hidden_states=(BATCH, 8, 32),
        global_hidden_states=(BATCH, 1, TEXT),
        encoder_hidden_states=_TEXT,
        rotary_embedding=("pair", 33, 16),
        encoder_attention_mask=None,
    ),
    "StableCascadeUNet": dict(
        timestep_ratio=("float", BATCH),
        clip_text_pooled=(BATCH, 1, TEXT),
        clip_text=_TEXT,
        clip_img=(BATCH, 1, TEXT),
    ),
    "T5FilmDecoder": dict(
        encodings_and_masks=("list", ("tuple", (BATCH, 9, WIDTH), ("ones", BATCH, 9))),
        decoder_input_tokens=(BATCH, TEXT_LENGTH, 8),
        decoder_noise_time=("float", BATCH),
    ),
    "TransformerTemporalModel": dict(hidden_states=(4 * BATCH, 32, 4, 4), num_frames=4, encoder_hidden_states=None),
    "UNet1DModel": dict(sample=(BATCH, 2, 64)),
    "UNet3DConditionModel": dict(sample=(BATCH, CHANNELS, FRAMES, SIDE, SIDE)),
    "UNetControlNetXSModel": dict(controlnet_cond=(BATCH, CHANNELS, SIDE, SIDE)),
    "UNetMotionModel": dict(
        sample=(BATCH, CHANNELS, FRAMES, SIDE, SIDE), encoder_hidden_states=(BATCH * FRAMES, TEXT_LENGTH, TEXT)
    ),
    "UNetSpatioTemporalConditionModel": dict(
        sample=(BATCH, FRAMES, 8, SIDE, SIDE),
        encoder_hidden_states=(BATCH, 1, TEXT),
        added_time_ids=("float", BATCH, 3),
    ),
    "UVit2DModel": dict(
        input_ids=("ids", 30, BATCH, 8, 8),
        pooled_text_emb=(BATCH, TEXT),
        micro_conds=("float", BATCH, 5),
        encoder_hidden_states=_TEXT,
    ),
    "WanTransformer3DModel": dict(encoder_hidden_states_image=(BATCH, 257, TEXT)),
    "WanAnimateTransformer3DModel": dict(
        encoder_hidden_states_image=(BATCH, 5, TEXT),
        hidden_states=(BATCH, 12, 3, SIDE, SIDE),
        pose_hidden_states=(BATCH, CHANNELS, 2, SIDE, SIDE),
        face_pixel_values=(BATCH, 3, 5, SIDE, SIDE),
    ),
    "WanVACETransformer3DModel": dict(
        control_hidden_states=(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
        control_hidden_states_scale=("ones", 2),
    ),
    "ZImageControlNetModel": dict(
        x=("list", *[(CHANNELS, 1, SIDE, SIDE)] * 2),
        cap_feats=("list", (9, TEXT), (16, TEXT)),
        control_context=("list", *[(CHANNELS, 1, SIDE, SIDE)] * 2),
    ),
    "ZImageTransformer2DModel": dict(
        x=("list", *[(CHANNELS, 1, SIDE, SIDE)] * 2), cap_feats=("list", (9, TEXT), (40, TEXT))
    ),
}
