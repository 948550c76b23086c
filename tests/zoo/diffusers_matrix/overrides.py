"""What single classes need beyond the names of their constructor's arguments, and why some are built but not run."""

from .sizes import CHANNELS, FRAMES, HEADS, SIDE, TEXT, TEXT_LENGTH, WIDTH

_UNET = dict(block_out_channels=(32, 64), cross_attention_dim=TEXT, norm_num_groups=8)
_UNET_2D = _UNET | dict(attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"))
_CONTROLNET = _UNET_2D | dict(conditioning_channels=CHANNELS, conditioning_embedding_out_channels=(16,))
_MOTION = dict(down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"))
_UNET_3D = dict(
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")
)
_COG = dict(time_embed_dim=TEXT, sample_width=SIDE, sample_height=SIDE, sample_frames=FRAMES, in_channels=CHANNELS)
_SANA = dict(cross_attention_dim=WIDTH, caption_channels=TEXT, in_channels=CHANNELS, out_channels=CHANNELS)
_HUNYUAN_DIT = dict(
    in_channels=CHANNELS,
    patch_size=2,
    hidden_size=WIDTH,
    cross_attention_dim=TEXT,
    cross_attention_dim_t5=TEXT,
    pooled_projection_dim=TEXT,
    text_len=TEXT_LENGTH,
    text_len_t5=TEXT_LENGTH,
    use_style_cond_and_image_meta_size=False,
)
_LTX2 = dict(
    in_channels=CHANNELS,
    out_channels=CHANNELS,
    audio_in_channels=CHANNELS,
    audio_out_channels=CHANNELS,
    cross_attention_dim=WIDTH,
    audio_cross_attention_dim=WIDTH,
    caption_channels=TEXT,
)
CONFIG: dict[str, dict] = {
    "AceStepTransformer1DModel": dict(in_channels=12, audio_acoustic_hidden_dim=CHANNELS, sliding_window=8),
    "AllegroTransformer3DModel": dict(cross_attention_dim=WIDTH, sample_frames=FRAMES),
    "AnyFlowFARTransformer3DModel": dict(chunk_partition=(1, 1)),
    "BriaFibo2Transformer2DModel": dict(
        injection_layer_ids=(1,), min_num_gist_tokens=8, max_num_gist_tokens=8, gist_step=8
    ),
    "BriaFiboTransformer2DModel": dict(text_encoder_dim=TEXT),
    "CogVideoXTransformer3DModel": _COG,
    "ConsisIDTransformer3DModel": _COG,
    "CogView3PlusTransformer2DModel": dict(time_embed_dim=TEXT, condition_dim=8),
    "CogView4Transformer2DModel": dict(time_embed_dim=TEXT, condition_dim=8, rope_axes_dim=(32, 32)),
    "ControlNetModel": _CONTROLNET,
    "ControlNetUnionModel": _CONTROLNET
    | dict(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + TEXT,
        num_trans_channel=32,
        num_trans_head=2,
        num_proj_channel=32,
    ),
    "CosmosControlNetModel": dict(n_controlnet_blocks=1, in_channels=6, latent_channels=CHANNELS + 2),
    "CosmosTransformer3DModel": dict(
        in_channels=CHANNELS, max_size=(8, 32, 32), extra_pos_embed_type=None, concat_padding_mask=False
    ),
    "DiTTransformer2DModel": dict(num_embeds_ada_norm=10, out_channels=CHANNELS),
    "DreamLiteTransformer2DModel": dict(in_channels=32, cross_attention_dim=TEXT),
    "DreamLiteUNetModel": _UNET | dict(attention_head_dim=16, block_out_channels=(32, 64, 64)),
    "EasyAnimateTransformer3DModel": dict(in_channels=CHANNELS, patch_size=2, out_channels=CHANNELS),
    "ErnieImageTransformer2DModel": dict(in_channels=CHANNELS, out_channels=CHANNELS),
    "GlmImageTransformer2DModel": dict(time_embed_dim=TEXT, condition_dim=8, prior_vq_quantizer_codebook_size=16),
    "HiDreamImageTransformer2DModel": dict(
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        caption_channels=[TEXT, TEXT],
        llama_layers=[0, 1, 2, 3],
        axes_dims_rope=(16, 8, 8),
        max_resolution=(SIDE, SIDE),
    ),
    "HunyuanDiT2DControlNetModel": _HUNYUAN_DIT | dict(transformer_num_layers=4),
    "HunyuanDiT2DModel": _HUNYUAN_DIT | dict(num_layers=4),
    "HunyuanVideoFramepackTransformer3DModel": dict(has_clean_x_embedder=True, has_image_proj=True),
    "HunyuanVideo15Transformer3DModel": dict(in_channels=CHANNELS, text_embed_2_dim=TEXT, target_size=SIDE),
    "I2VGenXLUNet": _UNET | _UNET_3D | dict(attention_head_dim=8),
    "Ideogram4Transformer2DModel": dict(mrope_section=(6, 5, 5), in_channels=CHANNELS),
    "Kandinsky3UNet": dict(
        time_embedding_dim=TEXT,
        groups=8,
        attention_head_dim=8,
        block_out_channels=(32, 64, 128, 256),
        cross_attention_dim=TEXT,
        layers_per_block=3,
    ),
    "Kandinsky5Transformer3DModel": dict(axes_dims=(8, 12, 12)),
    "Kandinsky6Transformer3DModel": dict(visual_cond=False),
    "Kandinsky6SRTransformer3DModel": {},
    "Krea2Transformer2DModel": dict(num_text_layers=3),
    "LTX2VideoTransformer3DModel": _LTX2,
    "SanaWMLTX2RefinerTransformer3DModel": _LTX2,
    "LTXVideoTransformer3DModel": dict(in_channels=CHANNELS, out_channels=CHANNELS, cross_attention_dim=WIDTH),
    "LatteTransformer3DModel": dict(
        in_channels=CHANNELS,
        patch_size=2,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT,
        video_length=FRAMES,
        norm_type="ada_norm_single",
        out_channels=CHANNELS,
        norm_elementwise_affine=False,
    ),
    "LuminaNextDiT2DModel": dict(num_kv_heads=HEADS, cross_attention_dim=TEXT, sample_size=SIDE),
    "MiniMaxH3Transformer3DModel": dict(in_channels=CHANNELS, audio_in_channels=CHANNELS, rope_freq_dim=4),
    "MiniMaxMusic3Transformer1DModel": dict(in_channels=CHANNELS),
    "MotionAdapter": dict(block_out_channels=(32, 64)),
    "OmniGenTransformer2DModel": dict(
        vocab_size=64,
        pad_token_id=0,
        rope_scaling=dict(short_factor=[1.0] * 16, long_factor=[1.0] * 16),
    ),
    "PRXTransformer2DModel": dict(axes_dim=[16, 16], in_channels=CHANNELS),
    "PriorTransformer": dict(embedding_dim=TEXT, clip_embed_dim=TEXT),
    "SanaControlNetModel": _SANA,
    "SanaTransformer2DModel": _SANA,
    "SanaVideoTransformer3DModel": _SANA,
    "SanaWMTransformer3DModel": dict(
        in_channels=CHANNELS, softmax_every_n=2, num_layers=4, chunk_plucker_post_attn_blocks=1
    ),
    "SparseControlNetModel": _UNET | _MOTION | dict(attention_head_dim=8, use_simplified_condition_embedding=True),
    "StableAudio3DiTModel": dict(io_channels=8, num_memory_tokens=4, local_add_cond_dim=5),
    "StableAudioDiTModel": dict(in_channels=8, out_channels=8, cross_attention_dim=TEXT, sample_size=32),
    "StableCascadeUNet": dict(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=(32, 64),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_in_channels=TEXT,
        clip_text_pooled_in_channels=TEXT,
        clip_image_in_channels=TEXT,
        dropout=(0.0, 0.0),
    ),
    "T5FilmDecoder": dict(input_dims=8, targets_length=TEXT_LENGTH, d_kv=32, dropout_rate=0.0),
    "Transformer2DModel": dict(in_channels=32, cross_attention_dim=TEXT),
    "TransformerTemporalModel": dict(in_channels=32, norm_num_groups=8),
    "UNet1DModel": dict(block_out_channels=(32, 32, 64), extra_in_channels=64),
    "UNet2DConditionModel": _UNET_2D | dict(up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    "UNet2DModel": dict(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet3DConditionModel": _UNET | _UNET_3D | dict(attention_head_dim=8),
    "UNetControlNetXSModel": dict(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT,
        ctrl_block_out_channels=(8, 16),
        ctrl_conditioning_embedding_out_channels=(16,),
        norm_num_groups=8,
        ctrl_conditioning_channels=CHANNELS,
        ctrl_max_norm_num_groups=4,
        ctrl_num_attention_heads=2,
    ),
    "UNetMotionModel": _UNET
    | _MOTION
    | dict(up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), num_attention_heads=2),
    "UNetSpatioTemporalConditionModel": dict(
        block_out_channels=(32, 64),
        cross_attention_dim=TEXT,
        num_attention_heads=(2, 2),
        num_frames=FRAMES,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
    ),
    "UVit2DModel": dict(
        vocab_size=32,
        codebook_size=31,
        in_channels=32,
        block_out_channels=32,
        micro_cond_embed_dim=TEXT * 5,
    ),
    "WanAnimate2Transformer3DModel": dict(in_dim=CHANNELS, out_dim=CHANNELS, use_img_emb=False),
    "WanAnimateTransformer3DModel": dict(
        in_channels=12,
        latent_channels=CHANNELS,
        out_channels=CHANNELS,
        image_dim=TEXT,
        motion_encoder_size=SIDE,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_style_dim=16,
        motion_dim=4,
        motion_encoder_dim=16,
        inject_face_latents_blocks=2,
    ),
    "WanVACETransformer3DModel": dict(vace_layers=[0, 1], vace_in_channels=CHANNELS),
    "WanTransformer3DModel": dict(image_dim=TEXT, added_kv_proj_dim=WIDTH),
    "ZImageControlNetModel": dict(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=CHANNELS,
    ),
    "ZImageTransformer2DModel": dict(in_channels=CHANNELS),
}

OF_OTHERS: dict[str, tuple[str, int]] = {
    "FluxMultiControlNetModel": ("FluxControlNetModel", 2),
    "HunyuanDiT2DMultiControlNetModel": ("HunyuanDiT2DControlNetModel", 2),
    "QwenImageMultiControlNetModel": ("QwenImageControlNetModel", 1),
    "SD3MultiControlNetModel": ("SD3ControlNetModel", 2),
    "MultiControlNetModel": ("ControlNetModel", 2),
    "MultiControlNetUnionModel": ("ControlNetUnionModel", 2),
}
"""Classes that are made of several models of another class: which, and how many."""

LEFT_OUT: dict[str, str] = {
    "ControlNetXSAdapter": "has no forward of its own; it is part of UNetControlNetXSModel",
    "Cosmos3OmniTransformer": "takes packed sequences that its pipeline lays out",
    "CosmosControlNetModel": "needs torchvision",
    "MotionAdapter": "has no forward of its own; its blocks are part of UNetMotionModel",
    "RFD4ProteinaTransformer": "takes the features of a protein that its pipeline makes",
    "WanAnimate2Transformer3DModel": "takes a cache that its pipeline makes",
    "ZImageControlNetModel": "borrows modules of a transformer",
}
"""Classes that are built but not run: their sites are found and listed, their outputs are not compared."""

REPRESENTATIVE: tuple[str, ...] = (
    "AnyFlowFARTransformer3DModel",  # flex block masks
    "AuraFlowTransformer2DModel",  # joint attention, direct SDPA
    "ChromaTransformer2DModel",
    "CogVideoXTransformer3DModel",
    "CosmosTransformer3DModel",  # dispatcher without a backend
    "Flux2Transformer2DModel",  # a helper function between processor and dispatcher
    "FluxControlNetModel",
    "FluxTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "HunyuanDiT2DModel",
    "HunyuanVideoTransformer3DModel",  # key padding
    "LTXVideoTransformer3DModel",  # additive padding
    "LuminaNextDiT2DModel",
    "Lumina2Transformer2DModel",
    "MochiTransformer3DModel",  # one module attends in its own forward
    "PixArtTransformer2DModel",
    "PriorTransformer",
    "QwenImageTransformer2DModel",  # padding between text and image
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",  # linear attention
    "SanaWMTransformer3DModel",  # modules without processors
    "StableAudioDiTModel",
    "StableCascadeUNet",
    "T5FilmDecoder",  # softmax written out
    "UNet1DModel",  # softmax written out
    "UNet2DConditionModel",
    "UNetMotionModel",
    "UNetSpatioTemporalConditionModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)
"""Those that run with every test run: one of each way to attend, and the best known."""
