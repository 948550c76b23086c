"""What is fed to single model types, which class stands for them, and why some are left out."""

from .sizes import GRID, IMAGE, LENGTH, MELS, PATCH, SAMPLES, WIDTH

_FRAMES_BY_MELS = {"input_features": (2 * LENGTH, MELS)}
_FRAMES_BY_TWO_MELS = {"input_features": (LENGTH, 2 * MELS)}
_ONE_CHANNEL = {"input_values": (1, SAMPLES)}
_ONE_IMAGE_PER_ROW = {"pixel_values": (1, 3, IMAGE, IMAGE)}
_VIDEO = {"pixel_values": (2, 3, IMAGE, IMAGE)}

INPUTS: dict[str, dict] = {
    **{
        name: _FRAMES_BY_MELS
        for name in """canary cohere_asr parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt lasr_ctc
        lasr_encoder speech_to_text""".split()
    },
    **{name: _FRAMES_BY_TWO_MELS for name in "seamless_m4t seamless_m4t_v2 wav2vec2-bert".split()},
    **{name: _ONE_CHANNEL for name in ("mimi", "xcodec")},
    **{name: {"input_values": (1, 8 * SAMPLES)} for name in "pe_audio pe_audio_encoder".split()},
    **{name: _ONE_IMAGE_PER_ROW for name in "idefics idefics2 idefics3 smolvlm".split()},
    **{name: _VIDEO for name in "timesformer videomae vivit xclip".split()},
    "audio-spectrogram-transformer": {"input_values": (2 * LENGTH, MELS)},
    "videoprism": {"also": "pixel_values_videos"},
    "videoprism_vision_model": {"also": "pixel_values_videos"},
    "vjepa2": {"also": "pixel_values_videos"},
    **{name: {"also": "image_sizes"} for name in "lighton_ocr mistral3".split()},
    **{
        name: {"also": "input_features_mask", "input_features_mask": ("ones", 2 * LENGTH)}
        for name in "audioflamingo3 audioflamingo3_encoder glmasr".split()
    },
    "musicflamingo": {
        "tokens": LENGTH // 2,
        "also": "input_features_mask",
        "input_features_mask": ("ones", 2 * LENGTH),
    },
    **{
        name: {"also": "input_features_mask", "input_features": (MELS, 100), "input_features_mask": ("ones", 100)}
        for name in "qwen3_asr qwen3_asr_encoder".split()
    },
    **{
        name: {"also": "feature_attention_mask", "input_features": (MELS, 100), "feature_attention_mask": ("ones", 100)}
        for name in "qwen2_5_omni_thinker qwen3_omni_moe_thinker".split()
    },
    **{name: {"past_values": (32, 2)} for name in "patchtst patchtsmixer".split()},
    "timesfm": {
        "also": "past_values_padding freq",
        "past_values": (32,),
        "past_values_padding": [0] * 32,
        "freq": [0],
    },
    "timesfm2_5": {"past_values": (32,)},
    **{
        name: {"pixel_values": ("patches", 3, PATCH, PATCH)} for name in "kimi_k25 kimi_k25_vision paddleocr_vl".split()
    },
    "muse_glimmer_vision": {"pixel_values": ("patches", 6 * PATCH * PATCH)},
    **{
        name: {
            "also": "spatial_shapes pixel_attention_mask",
            "pixel_values": (GRID * GRID, 3 * PATCH * PATCH),
            "spatial_shapes": [GRID, GRID],
            "pixel_attention_mask": ("ones", GRID * GRID),
        }
        for name in "siglip2 siglip2_vision_model lfm2_vl".split()
    },
    **{
        name: {"also": "image_sizes", "pixel_values": (2, 3, IMAGE, IMAGE)}
        for name in "llava_next llava_next_video llava_onevision".split()
    },
    **{
        name: {"also": "qformer_input_ids qformer_attention_mask", "qformer_attention_mask": ("ones", "length")}
        | {"never": "decoder_input_ids"}
        | media
        for name, media in (("instructblip", {}), ("instructblipvideo", {"pixel_values": (2, 3, IMAGE, IMAGE)}))
    },
    "granite_speech": {"input_features": (2 * LENGTH, 160)},
    "granite_speech_plus": {"input_features": (2 * LENGTH, 160)},
    "granite_speech5_ctc": {"input_features": (2 * LENGTH, 4 * MELS)},
    "granite_speech5_encoder": {"input_features": (2 * LENGTH, 4 * MELS)},
    "blip_2_qformer": {
        "only": "query_embeds encoder_hidden_states",
        "query_embeds": (8, WIDTH),
        "encoder_hidden_states": (16, WIDTH),
    },
    "csm": {"never": "input_values"},
    "dia": {"never": "decoder_input_ids"},
    "decision_transformer": {
        "only": "states actions rewards returns_to_go timesteps attention_mask",
        "states": (8, 17),
        "actions": (8, 4),
        "rewards": (8, 1),
        "returns_to_go": (8, 1),
        "timesteps": list(range(8)),
        "attention_mask": ("ones", 8),
    },
    "diffusion_gemma": {"never": "pixel_values"},
    "gemma3n_audio": {
        "also": "audio_mel_mask",
        "audio_mel": (2 * LENGTH, MELS),
        "audio_mel_mask": [False] * (2 * LENGTH),
    },
    "blip-2": {"never": "decoder_input_ids"},
    "blt": {"also": "use_cache", "use_cache": False},
    "emu3": {"never": "pixel_values"},
    "fun_asr_nano": {
        "also": "input_features_mask",
        "input_features": (2 * LENGTH, 7 * MELS),
        "input_features_mask": ("ones", 2 * LENGTH),
    },
    "fun_asr_nano_encoder": {
        "also": "input_features_mask",
        "input_features": (2 * LENGTH, 7 * MELS),
        "input_features_mask": ("ones", 2 * LENGTH),
    },
    "qwen2_audio": {
        "tokens": LENGTH // 2,
        "also": "feature_attention_mask",
        "feature_attention_mask": ("ones", 2 * LENGTH),
    },
    "muse_glimmer": {"never": "pixel_values image_grid_thw"},
    "gemma4": {"never": "pixel_values input_features"},
    "gemma4_unified": {"never": "pixel_values input_features"},
    "gemma4_vision": {
        "also": "pixel_position_ids",
        "pixel_values": (GRID * GRID, 3 * PATCH * PATCH),
        "pixel_position_ids": [[x, y] for y in range(GRID) for x in range(GRID)],
    },
    "idefics": {
        "also": "image_attention_mask",
        "pixel_values": (1, 3, IMAGE, IMAGE),
        "image_attention_mask": ("ones", "length", 1),
    },
    "kosmos-2": {
        "also": "image_embeds_position_mask",
        "image_embeds_position_mask": [0] + [1] * 4 + [0] * (LENGTH - 5),
    },
    "kyutai_speech_to_text": {"input_ids": ("ids", "length", 3)},
    "llama4": {
        "also": "vision_feature_select_strategy",
        "vision_feature_select_strategy": "default",
        "tokens": GRID * GRID // 4,
    },
    "lxmert": {"also": "visual_feats visual_pos", "visual_feats": (4, 2048), "visual_pos": (4, 4)},
    "mllama": {
        "also": "aspect_ratio_ids aspect_ratio_mask cross_attention_mask",
        "pixel_values": (1, 1, 3, IMAGE, IMAGE),
        "aspect_ratio_ids": [1],
        "aspect_ratio_mask": [[1]],
        "cross_attention_mask": ("ones", "length", 1, 1),
    },
    "perceiver": {"inputs": ("ids", "length"), "never": "input_ids"},
    "pix2struct": {"flattened_patches": [[1.0] * (2 + 3 * PATCH * PATCH)] * (GRID * GRID)},
    "pop2piano": {"never": "input_ids attention_mask", "input_features": (LENGTH, WIDTH)},
    "seggpt": {
        "also": "prompt_pixel_values prompt_masks",
        "prompt_pixel_values": (3, IMAGE, IMAGE),
        "prompt_masks": (3, IMAGE, IMAGE),
    },
    "speech-encoder-decoder": {"only": "input_values decoder_input_ids", "decoder_input_ids": ("ids", "length")},
    "video_llama_3": {"also": "image_merge_sizes", "image_merge_sizes": 1},
    "video_llama_3_vision": {"also": "merge_sizes", "merge_sizes": 1},
    "voxtral_realtime": {"input_features": (MELS, 8 * LENGTH)},
}
"""See `feed._Feed` for the meaning of a row."""
CLASSES: dict[str, str] = {
    "musicgen_decoder": "MusicgenForCausalLM",
    "musicgen_melody_decoder": "MusicgenMelodyForCausalLM",
}
"""Model classes that no auto mapping names."""
KINDS: dict[str, str] = {
    **{
        name: "encoder"
        for name in """blip_2_qformer bros canine clip_text_model dpr layoutlmv3 lilt markuplm openai_privacy_filter
        splinter t5gemma2_encoder tipsv2_text_model sam3_lite_text_text_model patchtsmixer patchtst timesfm
        timesfm2_5 decision_transformer""".split()
    },
    **{
        name: "causal_lm"
        for name in """cosmos3_edge_text glm4v_moe_text glm4v_text glm_image_text glm_ocr_text hunyuan_vl_text
        muse_glimmer_text qwen2_5_vl_text qwen2_vl_text qwen3_vl_moe_text qwen3_vl_text glm5_next_text csm
        higgs_audio_v2 musicgen_decoder musicgen_melody_decoder moshi""".split()
    },
    **{
        name: "multimodal"
        for name in """aimv2 altclip bridgetower chinese_clip clip clipseg clvp flava groupvit lxmert metaclip_2 owlv2
        owlvit pe_audio siglip siglip2 tipsv2 vilt vision-text-dual-encoder visual_bert xclip videoprism""".split()
    },
    **{
        name: "audio"
        for name in """audio-spectrogram-transformer audioflamingo3 audioflamingo3_encoder fastspeech2_conformer
        fastspeech2_conformer_with_hifigan fun_asr_nano_encoder gemma3n_audio glmasr glmasr_encoder
        granite_speech5_encoder lasr_encoder mimi musicflamingo parakeet_encoder parakeet_rnnt parakeet_tdt
        pe_audio_encoder pop2piano qwen2_audio qwen2_audio_encoder qwen3_asr_encoder voxtral_encoder
        voxtral_realtime_encoder xcodec""".split()
    },
}
"""Kinds that do not follow from the auto mapping; a bare model not listed here is a vision model."""
UNBUILDABLE: dict[str, str] = {
    **{
        name: "needs the package timm"
        for name in """conditional_detr dab-detr deformable_detr detr fast_vlm gemma3n gemma3n_vision omdet-turbo
        pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder perception_lm table-transformer
        timm_backbone timm_wrapper""".split()
    },
    **{name: "downloads its backbone's configuration" for name in ("edgetam", "edgetam_vision_model")},
    **{
        name: "its forward pass takes a running video session, not tensors"
        for name in ("edgetam_video", "sam2_video", "sam3_tracker_video", "sam3_video")
    },
    **{
        name: "has an audio codec of 60 to 1000 million weights whose size is not in its common fields"
        for name in ("neucodec", "vibevoice", "vibevoice_asr", "xcodec2")
    },
    **{
        name: "its stages, strides and heads constrain each other in ways the shrinking rules do not cover"
        for name in """align cvt deimv2 depth_pro efficientloftr levit lw_detr mask2former maskformer mobilevitv2
        oneformer pp_doclayout_v2 pp_doclayout_v3 sam2 sam2_hiera_det_model sam2_vision_model sam3 sam3_lite_text
        sam3_tracker clap deepseek_vl_hybrid tvp""".split()
    },
    **{
        name: "time series: its features are assembled from many optional inputs"
        for name in ("autoformer", "informer", "time_series_transformer")
    },
    **{
        name: "eager attention in the library misreads the model's own mask, so there is no reference"
        for name in """gemma4_audio grounding-dino mm-grounding-dino nemotron3_5_asr nemotron_asr_streaming
        nemotron_asr_streaming_encoder""".split()
    },
    **{
        name: "an assistant that reads the key-value cache of another model"
        for name in ("gemma4_assistant", "gemma4_unified_assistant", "muse_glimmer_assistant")
    },
    "bark": "three models in a row without a forward pass of its own",
    "dinat": "needs the package natten",
    "glm_image": "expects grids of target images beside those of source images",
    "granite4_vision": "its default configuration cannot be instantiated",
    "higgs_audio_v2_tokenizer": "needs the package torchaudio",
    "inkling_mm_model": "needs the package scipy",
    "layoutlmv2": "needs the package detectron2",
    "lightglue": "wraps a keypoint detector and takes pairs of images",
    "musicgen": "wraps three models; its decoder is in the table",
    "musicgen_melody": "wraps three models; its decoder is in the table",
    "pi0": "a robot policy over images, states and actions",
    "vits": "random durations make the generated waveform arbitrarily long",
    "voxtral_realtime_text": "listed in the auto mapping without a class",
}
NO_ATTENTION: frozenset[str] = frozenset(
    """bit convnext convnextv2 dac dinov3_convnext efficientnet encodec fnet focalnet glm_image_vqmodel hgnet_v2
    mobilenet_v1 mobilenet_v2 poolformer pp_lcnet pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_rec
    pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec regnet resnet textnet univnet uvdoc
    vibevoice_acoustic_tokenizer xlstm vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
    mamba mamba2 falcon_mamba rwkv pp_ocrv5_server_det pp_ocrv6_medium_det rt_detr_resnet speecht5_hifigan
    fastspeech2_conformer_hifigan""".split()
)
"""Convolutions, recurrences and Fourier mixing: no softmax attention to replace."""
REPRESENTATIVE: tuple[str, ...] = tuple(
    """llama qwen3 gemma2 gemma3_text mistral gpt_oss granite_swa deepseek_v3 deepseek_v32 llama4_text gpt2 opt phi
    mixtral qwen3_next jamba doge bloom falcon gptj bert modernbert roberta splinter esm bart t5 umt5 mt5 t5gemma
    pegasus_x vit dinov2 swin siglip clip qwen2_5_vl qwen3_vl llava gemma3 paligemma llama4 mllama whisper wav2vec2
    parakeet_ctc voxtral""".split()
)
"""One family for each way attention is called: enough for every commit."""
