"""Models of timm that are like its plain ones and do not open, so that the error can name them.

Written by `make architectures` from timm 1.0.31.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """A file of timm; `{}` in a part stands for every number.

    Args:
        title: What it says that it holds.
        entrypoints: Its models that plain-vit does not open.
        marks: Parts of their layers that no other model of timm has.
        others: Parts beside them, in the same modules, that a Vision Transformer of timm has not.
    """

    title: str
    entrypoints: tuple[str, ...]
    marks: frozenset[str]
    others: frozenset[str]


# File, title, entrypoints, marks, other parts.
_FAMILIES: list[tuple[str, str, str, str, str]] = [
    ("cait", "Class-Attention in Image Transformers (CaiT)", """
        cait_m36_384 cait_m48_448 cait_s24_224 cait_s24_384 cait_s36_384 cait_xs24_384 cait_xxs24_224 cait_xxs24_384
        cait_xxs36_224 cait_xxs36_384
    """, """
        blocks.{}.attn.proj_l blocks.{}.attn.proj_w blocks_token_only.{}.attn.k blocks_token_only.{}.attn.proj
        blocks_token_only.{}.attn.q blocks_token_only.{}.attn.v blocks_token_only.{}.gamma_1
        blocks_token_only.{}.gamma_2 blocks_token_only.{}.mlp.fc1 blocks_token_only.{}.mlp.fc2
        blocks_token_only.{}.norm1 blocks_token_only.{}.norm2
    """, ""),
    ("coat", "CoaT architecture", """
        coat_lite_medium coat_lite_medium_384 coat_lite_mini coat_lite_small coat_lite_tiny coat_mini coat_small
        coat_tiny
    """, """
        crpe1.conv_list.{} crpe2.conv_list.{} crpe3.conv_list.{} crpe4.conv_list.{}
        parallel_blocks.{}.factoratt_crpe2.crpe.conv_list.{} parallel_blocks.{}.factoratt_crpe2.proj
        parallel_blocks.{}.factoratt_crpe2.qkv parallel_blocks.{}.factoratt_crpe3.crpe.conv_list.{}
        parallel_blocks.{}.factoratt_crpe3.proj parallel_blocks.{}.factoratt_crpe3.qkv
        parallel_blocks.{}.factoratt_crpe4.crpe.conv_list.{} parallel_blocks.{}.factoratt_crpe4.proj
        parallel_blocks.{}.factoratt_crpe4.qkv parallel_blocks.{}.mlp2.fc1 parallel_blocks.{}.mlp2.fc2
        parallel_blocks.{}.mlp3.fc1 parallel_blocks.{}.mlp3.fc2 parallel_blocks.{}.mlp4.fc1 parallel_blocks.{}.mlp4.fc2
        parallel_blocks.{}.norm12 parallel_blocks.{}.norm13 parallel_blocks.{}.norm14 parallel_blocks.{}.norm22
        parallel_blocks.{}.norm23 parallel_blocks.{}.norm24 serial_blocks1.{}.cpe.proj
        serial_blocks1.{}.factoratt_crpe.crpe.conv_list.{} serial_blocks1.{}.factoratt_crpe.proj
        serial_blocks1.{}.factoratt_crpe.qkv serial_blocks1.{}.mlp.fc1 serial_blocks1.{}.mlp.fc2 serial_blocks1.{}.norm1
        serial_blocks1.{}.norm2 serial_blocks2.{}.cpe.proj serial_blocks2.{}.factoratt_crpe.crpe.conv_list.{}
        serial_blocks2.{}.factoratt_crpe.proj serial_blocks2.{}.factoratt_crpe.qkv serial_blocks2.{}.mlp.fc1
        serial_blocks2.{}.mlp.fc2 serial_blocks2.{}.norm1 serial_blocks2.{}.norm2 serial_blocks3.{}.cpe.proj
        serial_blocks3.{}.factoratt_crpe.crpe.conv_list.{} serial_blocks3.{}.factoratt_crpe.proj
        serial_blocks3.{}.factoratt_crpe.qkv serial_blocks3.{}.mlp.fc1 serial_blocks3.{}.mlp.fc2 serial_blocks3.{}.norm1
        serial_blocks3.{}.norm2 serial_blocks4.{}.cpe.proj serial_blocks4.{}.factoratt_crpe.crpe.conv_list.{}
        serial_blocks4.{}.factoratt_crpe.proj serial_blocks4.{}.factoratt_crpe.qkv serial_blocks4.{}.mlp.fc1
        serial_blocks4.{}.mlp.fc2 serial_blocks4.{}.norm1 serial_blocks4.{}.norm2
    """, ""),
    ("convit", "ConViT Model", """
        convit_base convit_small convit_tiny
    """, """
        blocks.{}.attn.gating_param blocks.{}.attn.pos_proj blocks.{}.attn.qk blocks.{}.attn.v
    """, ""),
    ("crossvit", "CrossViT Model", """
        crossvit_9_240 crossvit_9_dagger_240 crossvit_15_240 crossvit_15_dagger_240 crossvit_15_dagger_408
        crossvit_18_240 crossvit_18_dagger_240 crossvit_18_dagger_408 crossvit_base_240 crossvit_small_240
        crossvit_tiny_240
    """, """
        blocks.{}.blocks.{}.{}.attn.proj blocks.{}.blocks.{}.{}.attn.qkv blocks.{}.blocks.{}.{}.mlp.fc1
        blocks.{}.blocks.{}.{}.mlp.fc2 blocks.{}.blocks.{}.{}.norm1 blocks.{}.blocks.{}.{}.norm2
        blocks.{}.fusion.{}.attn.proj blocks.{}.fusion.{}.attn.wk blocks.{}.fusion.{}.attn.wq
        blocks.{}.fusion.{}.attn.wv blocks.{}.fusion.{}.norm1 blocks.{}.projs.{}.{} blocks.{}.revert_projs.{}.{}
    """, ""),
    ("csatv2", "CSATv2", """
        csatv2 csatv2_21m
    """, """
        stages.{}.{} stages.{}.{}.attn.attn.mlp.fc1 stages.{}.{}.attn.attn.mlp.fc2 stages.{}.{}.attn.attn.norm1
        stages.{}.{}.attn.attn.norm2 stages.{}.{}.attn.attn.pos_embed.proj stages.{}.{}.attn.attn.qkv
        stages.{}.{}.attn.proj stages.{}.{}.attn.qkv stages.{}.{}.dwconv stages.{}.{}.grn stages.{}.{}.mlp.fc1
        stages.{}.{}.mlp.fc2 stages.{}.{}.norm1 stages.{}.{}.norm2 stages.{}.{}.pos_embed.proj stages.{}.{}.pwconv1
        stages.{}.{}.pwconv2
    """, """
        stages.{}.{}.attn.conv stages.{}.{}.norm
    """),
    ("davit", "DaViT: Dual Attention Vision Transformers", """
        davit_base davit_base_fl davit_giant davit_huge davit_huge_fl davit_large davit_small davit_tiny
    """, """
        stages.{}.blocks.{}.channel_block.attn.proj stages.{}.blocks.{}.channel_block.attn.qkv
        stages.{}.blocks.{}.channel_block.cpe1.proj stages.{}.blocks.{}.channel_block.cpe2.proj
        stages.{}.blocks.{}.channel_block.mlp.fc1 stages.{}.blocks.{}.channel_block.mlp.fc2
        stages.{}.blocks.{}.channel_block.norm1 stages.{}.blocks.{}.channel_block.norm2
        stages.{}.blocks.{}.spatial_block.attn.proj stages.{}.blocks.{}.spatial_block.attn.qkv
        stages.{}.blocks.{}.spatial_block.cpe1.proj stages.{}.blocks.{}.spatial_block.cpe2.proj
        stages.{}.blocks.{}.spatial_block.mlp.fc1 stages.{}.blocks.{}.spatial_block.mlp.fc2
        stages.{}.blocks.{}.spatial_block.norm1 stages.{}.blocks.{}.spatial_block.norm2 stages.{}.blocks.{}.{}.attn.proj
        stages.{}.blocks.{}.{}.attn.qkv stages.{}.blocks.{}.{}.cpe1.proj stages.{}.blocks.{}.{}.cpe2.proj
        stages.{}.blocks.{}.{}.mlp.fc1 stages.{}.blocks.{}.{}.mlp.fc2 stages.{}.blocks.{}.{}.norm1
        stages.{}.blocks.{}.{}.norm2
    """, """
        stages.{}.downsample.conv stages.{}.downsample.norm
    """),
    ("deepseek_vit", "DeepSeek Vision Transformer", """
        deepseek_vit_412m deepseek_vit_412m_align deepseek_vit_412m_enc
    """, "", ""),
    ("efficientformer", "EfficientFormer", """
        efficientformer_l1 efficientformer_l3 efficientformer_l7
    """, """
        stages.{}.blocks.{}.mlp.norm1 stages.{}.blocks.{}.mlp.norm2 stages.{}.blocks.{}.token_mixer.attention_bias_idxs
    """, """
        stages.{}.blocks.{}.ls1.gamma stages.{}.blocks.{}.ls2.gamma stages.{}.blocks.{}.mlp.fc1
        stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm2
        stages.{}.blocks.{}.token_mixer.attention_biases stages.{}.blocks.{}.token_mixer.proj
        stages.{}.blocks.{}.token_mixer.qkv stages.{}.downsample.conv stages.{}.downsample.norm
    """),
    ("efficientvit_mit", "EfficientViT (by MIT Song Han's Lab)", """
        efficientvit_b0 efficientvit_b1 efficientvit_b2 efficientvit_b3 efficientvit_l1 efficientvit_l2 efficientvit_l3
    """, """
        stages.{}.blocks.{}.context_module.main.aggreg.{}.{} stages.{}.blocks.{}.context_module.main.proj.conv
        stages.{}.blocks.{}.context_module.main.qkv.conv stages.{}.blocks.{}.local_module.main.depth_conv.conv
        stages.{}.blocks.{}.local_module.main.inverted_conv.conv stages.{}.blocks.{}.local_module.main.point_conv.conv
        stages.{}.blocks.{}.main.depth_conv.conv stages.{}.blocks.{}.main.inverted_conv.conv
        stages.{}.blocks.{}.main.point_conv.conv stages.{}.blocks.{}.main.spatial_conv.conv
    """, """
        stages.{}.blocks.{}.context_module.main.proj.norm stages.{}.blocks.{}.local_module.main.point_conv.norm
        stages.{}.blocks.{}.main.depth_conv.norm stages.{}.blocks.{}.main.inverted_conv.norm
        stages.{}.blocks.{}.main.point_conv.norm stages.{}.blocks.{}.main.spatial_conv.norm
    """),
    ("efficientvit_msra", "EfficientViT (by MSRA)", """
        efficientvit_m0 efficientvit_m1 efficientvit_m2 efficientvit_m3 efficientvit_m4 efficientvit_m5
    """, """
        stages.{}.blocks.{}.dw0.m.bn stages.{}.blocks.{}.dw0.m.conv stages.{}.blocks.{}.dw1.m.bn
        stages.{}.blocks.{}.dw1.m.conv stages.{}.blocks.{}.ffn0.m.pw1.bn stages.{}.blocks.{}.ffn0.m.pw1.conv
        stages.{}.blocks.{}.ffn0.m.pw2.bn stages.{}.blocks.{}.ffn0.m.pw2.conv stages.{}.blocks.{}.ffn1.m.pw1.bn
        stages.{}.blocks.{}.ffn1.m.pw1.conv stages.{}.blocks.{}.ffn1.m.pw2.bn stages.{}.blocks.{}.ffn1.m.pw2.conv
        stages.{}.blocks.{}.mixer.m.attn.attention_biases stages.{}.blocks.{}.mixer.m.attn.dws.{}.bn
        stages.{}.blocks.{}.mixer.m.attn.dws.{}.conv stages.{}.blocks.{}.mixer.m.attn.proj.{}.bn
        stages.{}.blocks.{}.mixer.m.attn.proj.{}.conv stages.{}.blocks.{}.mixer.m.attn.qkvs.{}.bn
        stages.{}.blocks.{}.mixer.m.attn.qkvs.{}.conv stages.{}.downsample.patchmerge.conv1.bn
        stages.{}.downsample.patchmerge.conv1.conv stages.{}.downsample.patchmerge.conv2.bn
        stages.{}.downsample.patchmerge.conv2.conv stages.{}.downsample.patchmerge.conv3.bn
        stages.{}.downsample.patchmerge.conv3.conv stages.{}.downsample.patchmerge.se.fc1
        stages.{}.downsample.patchmerge.se.fc2 stages.{}.downsample.res1.{}.m.bn stages.{}.downsample.res1.{}.m.conv
        stages.{}.downsample.res1.{}.m.pw1.bn stages.{}.downsample.res1.{}.m.pw1.conv
        stages.{}.downsample.res1.{}.m.pw2.bn stages.{}.downsample.res1.{}.m.pw2.conv stages.{}.downsample.res2.{}.m.bn
        stages.{}.downsample.res2.{}.m.conv stages.{}.downsample.res2.{}.m.pw1.bn
        stages.{}.downsample.res2.{}.m.pw1.conv stages.{}.downsample.res2.{}.m.pw2.bn
        stages.{}.downsample.res2.{}.m.pw2.conv
    """, ""),
    ("gcvit", "Global Context ViT", """
        gcvit_base gcvit_small gcvit_tiny gcvit_xtiny gcvit_xxtiny
    """, """
        stages.{}.downsample.conv_block.conv_dw stages.{}.downsample.conv_block.conv_pw
        stages.{}.downsample.conv_block.se.fc1 stages.{}.downsample.conv_block.se.fc2 stages.{}.downsample.norm1
        stages.{}.downsample.norm2 stages.{}.global_block.blocks.conv1.conv_dw
        stages.{}.global_block.blocks.conv1.conv_pw stages.{}.global_block.blocks.conv1.se.fc1
        stages.{}.global_block.blocks.conv1.se.fc2 stages.{}.global_block.blocks.conv2.conv_dw
        stages.{}.global_block.blocks.conv2.conv_pw stages.{}.global_block.blocks.conv2.se.fc1
        stages.{}.global_block.blocks.conv2.se.fc2 stages.{}.global_block.blocks.conv3.conv_dw
        stages.{}.global_block.blocks.conv3.conv_pw stages.{}.global_block.blocks.conv3.se.fc1
        stages.{}.global_block.blocks.conv3.se.fc2
    """, """
        stages.{}.blocks.{}.attn.proj stages.{}.blocks.{}.attn.qkv
        stages.{}.blocks.{}.attn.rel_pos.relative_position_bias_table stages.{}.blocks.{}.ls1.gamma
        stages.{}.blocks.{}.ls2.gamma stages.{}.blocks.{}.mlp.fc1 stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm1
        stages.{}.blocks.{}.norm2 stages.{}.downsample.reduction stages.{}.norm
    """),
    ("gemma4_vit", "Gemma4 Vision Transformer", """
        gemma4_vit_167m gemma4_vit_167m_enc gemma4_vit_570m gemma4_vit_570m_enc
    """, """
        blocks.{}.attn.k_proj.input_max blocks.{}.attn.k_proj.input_min blocks.{}.attn.k_proj.linear
        blocks.{}.attn.k_proj.output_max blocks.{}.attn.k_proj.output_min blocks.{}.attn.o_proj.input_max
        blocks.{}.attn.o_proj.input_min blocks.{}.attn.o_proj.linear blocks.{}.attn.o_proj.output_max
        blocks.{}.attn.o_proj.output_min blocks.{}.attn.q_proj.input_max blocks.{}.attn.q_proj.input_min
        blocks.{}.attn.q_proj.linear blocks.{}.attn.q_proj.output_max blocks.{}.attn.q_proj.output_min
        blocks.{}.attn.v_proj.input_max blocks.{}.attn.v_proj.input_min blocks.{}.attn.v_proj.linear
        blocks.{}.attn.v_proj.output_max blocks.{}.attn.v_proj.output_min blocks.{}.mlp.down_proj.input_max
        blocks.{}.mlp.down_proj.input_min blocks.{}.mlp.down_proj.linear blocks.{}.mlp.down_proj.output_max
        blocks.{}.mlp.down_proj.output_min blocks.{}.mlp.gate_proj.input_max blocks.{}.mlp.gate_proj.input_min
        blocks.{}.mlp.gate_proj.linear blocks.{}.mlp.gate_proj.output_max blocks.{}.mlp.gate_proj.output_min
        blocks.{}.mlp.up_proj.input_max blocks.{}.mlp.up_proj.input_min blocks.{}.mlp.up_proj.linear
        blocks.{}.mlp.up_proj.output_max blocks.{}.mlp.up_proj.output_min blocks.{}.norm4
        encoder.blocks.{}.attn.k_proj.input_max encoder.blocks.{}.attn.k_proj.input_min
        encoder.blocks.{}.attn.k_proj.linear encoder.blocks.{}.attn.k_proj.output_max
        encoder.blocks.{}.attn.k_proj.output_min encoder.blocks.{}.attn.o_proj.input_max
        encoder.blocks.{}.attn.o_proj.input_min encoder.blocks.{}.attn.o_proj.linear
        encoder.blocks.{}.attn.o_proj.output_max encoder.blocks.{}.attn.o_proj.output_min
        encoder.blocks.{}.attn.q_proj.input_max encoder.blocks.{}.attn.q_proj.input_min
        encoder.blocks.{}.attn.q_proj.linear encoder.blocks.{}.attn.q_proj.output_max
        encoder.blocks.{}.attn.q_proj.output_min encoder.blocks.{}.attn.v_proj.input_max
        encoder.blocks.{}.attn.v_proj.input_min encoder.blocks.{}.attn.v_proj.linear
        encoder.blocks.{}.attn.v_proj.output_max encoder.blocks.{}.attn.v_proj.output_min
        encoder.blocks.{}.mlp.down_proj.input_max encoder.blocks.{}.mlp.down_proj.input_min
        encoder.blocks.{}.mlp.down_proj.linear encoder.blocks.{}.mlp.down_proj.output_max
        encoder.blocks.{}.mlp.down_proj.output_min encoder.blocks.{}.mlp.gate_proj.input_max
        encoder.blocks.{}.mlp.gate_proj.input_min encoder.blocks.{}.mlp.gate_proj.linear
        encoder.blocks.{}.mlp.gate_proj.output_max encoder.blocks.{}.mlp.gate_proj.output_min
        encoder.blocks.{}.mlp.up_proj.input_max encoder.blocks.{}.mlp.up_proj.input_min
        encoder.blocks.{}.mlp.up_proj.linear encoder.blocks.{}.mlp.up_proj.output_max
        encoder.blocks.{}.mlp.up_proj.output_min encoder.blocks.{}.norm3 encoder.blocks.{}.norm4
    """, """
        blocks.{}.norm3 encoder.blocks.{}.attn.k_norm encoder.blocks.{}.attn.q_norm encoder.blocks.{}.norm1
        encoder.blocks.{}.norm2 encoder.patch_embed.input_proj encoder.patch_embed.position_embedding_table
        encoder.std_bias encoder.std_scale
    """),
    ("hiera", "An PyTorch implementation of Hiera", """
        hiera_base_224 hiera_base_abswin_256 hiera_base_plus_224 hiera_huge_224 hiera_large_224 hiera_small_224
        hiera_small_abswin_256 hiera_tiny_224
    """, "", ""),
    ("hieradet_sam2", "HieraDet (SAM 2 Hiera image encoder)", """
        hieradet_small sam2_hiera_base_plus sam2_hiera_large sam2_hiera_small sam2_hiera_tiny
    """, "", ""),
    ("levit", "LeViT", """
        levit_128 levit_128s levit_192 levit_256 levit_256d levit_384 levit_384_s8 levit_512 levit_512_s8 levit_512d
        levit_conv_128 levit_conv_128s levit_conv_192 levit_conv_256 levit_conv_256d levit_conv_384 levit_conv_384_s8
        levit_conv_512 levit_conv_512_s8 levit_conv_512d
    """, """
        stages.{}.blocks.{}.attn.proj.ln.bn stages.{}.blocks.{}.attn.proj.ln.linear stages.{}.blocks.{}.attn.qkv.bn
        stages.{}.blocks.{}.attn.qkv.linear stages.{}.blocks.{}.mlp.ln1.bn stages.{}.blocks.{}.mlp.ln1.linear
        stages.{}.blocks.{}.mlp.ln2.bn stages.{}.blocks.{}.mlp.ln2.linear
        stages.{}.downsample.attn_downsample.attention_biases stages.{}.downsample.attn_downsample.kv.bn
        stages.{}.downsample.attn_downsample.kv.linear stages.{}.downsample.attn_downsample.proj.ln.bn
        stages.{}.downsample.attn_downsample.proj.ln.linear stages.{}.downsample.attn_downsample.q.ln.bn
        stages.{}.downsample.attn_downsample.q.ln.linear stages.{}.downsample.mlp.ln1.bn
        stages.{}.downsample.mlp.ln1.linear stages.{}.downsample.mlp.ln2.bn stages.{}.downsample.mlp.ln2.linear
    """, """
        stages.{}.blocks.{}.attn.attention_biases
    """),
    ("maxxvit", "MaxVit and CoAtNet Vision Transformer - CNN Hybrids in PyTorch", """
        coatnet_0_224 coatnet_0_rw_224 coatnet_1_224 coatnet_1_rw_224 coatnet_2_224 coatnet_2_rw_224 coatnet_3_224
        coatnet_3_rw_224 coatnet_4_224 coatnet_5_224 coatnet_bn_0_rw_224 coatnet_nano_cc_224 coatnet_nano_rw_224
        coatnet_pico_rw_224 coatnet_rmlp_0_rw_224 coatnet_rmlp_1_rw2_224 coatnet_rmlp_1_rw_224 coatnet_rmlp_2_rw_224
        coatnet_rmlp_2_rw_384 coatnet_rmlp_3_rw_224 coatnet_rmlp_nano_rw_224 coatnext_nano_rw_224 maxvit_base_tf_224
        maxvit_base_tf_384 maxvit_base_tf_512 maxvit_large_tf_224 maxvit_large_tf_384 maxvit_large_tf_512
        maxvit_nano_rw_256 maxvit_pico_rw_256 maxvit_rmlp_base_rw_224 maxvit_rmlp_base_rw_384 maxvit_rmlp_nano_rw_256
        maxvit_rmlp_pico_rw_256 maxvit_rmlp_small_rw_224 maxvit_rmlp_small_rw_256 maxvit_rmlp_tiny_rw_256
        maxvit_small_tf_224 maxvit_small_tf_384 maxvit_small_tf_512 maxvit_tiny_pm_256 maxvit_tiny_rw_224
        maxvit_tiny_rw_256 maxvit_tiny_tf_224 maxvit_tiny_tf_384 maxvit_tiny_tf_512 maxvit_xlarge_tf_224
        maxvit_xlarge_tf_384 maxvit_xlarge_tf_512 maxxvit_rmlp_nano_rw_256 maxxvit_rmlp_small_rw_256
        maxxvit_rmlp_tiny_rw_256 maxxvitv2_nano_rw_256 maxxvitv2_rmlp_base_rw_224 maxxvitv2_rmlp_base_rw_384
        maxxvitv2_rmlp_large_rw_224 test_coatnet test_maxvit
    """, """
        stages.{}.blocks.{}.attn.attn_block.proj stages.{}.blocks.{}.attn.attn_block.qkv
        stages.{}.blocks.{}.attn.attn_block.rel_pos.relative_position_bias_table stages.{}.blocks.{}.attn.attn_grid.proj
        stages.{}.blocks.{}.attn.attn_grid.qkv stages.{}.blocks.{}.attn.attn_grid.rel_pos.relative_position_bias_table
        stages.{}.blocks.{}.attn.mlp.fc1 stages.{}.blocks.{}.attn.mlp.fc2 stages.{}.blocks.{}.attn.norm1
        stages.{}.blocks.{}.attn.norm2 stages.{}.blocks.{}.attn.rel_pos.mlp.fc1 stages.{}.blocks.{}.attn.rel_pos.mlp.fc2
        stages.{}.blocks.{}.attn_block.attn.proj stages.{}.blocks.{}.attn_block.attn.qkv
        stages.{}.blocks.{}.attn_block.attn.rel_pos.mlp.fc1 stages.{}.blocks.{}.attn_block.attn.rel_pos.mlp.fc2
        stages.{}.blocks.{}.attn_block.attn.rel_pos.relative_position_bias_table
        stages.{}.blocks.{}.attn_block.ls1.gamma stages.{}.blocks.{}.attn_block.ls2.gamma
        stages.{}.blocks.{}.attn_block.mlp.fc1 stages.{}.blocks.{}.attn_block.mlp.fc2
        stages.{}.blocks.{}.attn_block.norm1 stages.{}.blocks.{}.attn_block.norm2
        stages.{}.blocks.{}.attn_grid.attn.proj stages.{}.blocks.{}.attn_grid.attn.qkv
        stages.{}.blocks.{}.attn_grid.attn.rel_pos.mlp.fc1 stages.{}.blocks.{}.attn_grid.attn.rel_pos.mlp.fc2
        stages.{}.blocks.{}.attn_grid.attn.rel_pos.relative_position_bias_table stages.{}.blocks.{}.attn_grid.ls1.gamma
        stages.{}.blocks.{}.attn_grid.ls2.gamma stages.{}.blocks.{}.attn_grid.mlp.fc1
        stages.{}.blocks.{}.attn_grid.mlp.fc2 stages.{}.blocks.{}.attn_grid.norm1 stages.{}.blocks.{}.attn_grid.norm2
        stages.{}.blocks.{}.conv.conv1_1x1 stages.{}.blocks.{}.conv.conv2_kxk stages.{}.blocks.{}.conv.conv3_1x1
        stages.{}.blocks.{}.conv.conv_dw stages.{}.blocks.{}.conv.ls.gamma stages.{}.blocks.{}.conv.mlp.fc1
        stages.{}.blocks.{}.conv.mlp.fc2 stages.{}.blocks.{}.conv.norm1 stages.{}.blocks.{}.conv.norm2
        stages.{}.blocks.{}.conv.pre_norm stages.{}.blocks.{}.conv.se.fc1 stages.{}.blocks.{}.conv.se.fc2
        stages.{}.blocks.{}.conv.shortcut.expand stages.{}.blocks.{}.conv.{}.conv1_1x1
        stages.{}.blocks.{}.conv.{}.conv2_kxk stages.{}.blocks.{}.conv.{}.conv3_1x1 stages.{}.blocks.{}.conv.{}.norm1
        stages.{}.blocks.{}.conv.{}.norm2 stages.{}.blocks.{}.conv.{}.pre_norm stages.{}.blocks.{}.conv.{}.se.fc1
        stages.{}.blocks.{}.conv.{}.se.fc2 stages.{}.blocks.{}.conv.{}.shortcut.expand stages.{}.blocks.{}.conv1_1x1
        stages.{}.blocks.{}.conv2_kxk stages.{}.blocks.{}.conv3_1x1 stages.{}.blocks.{}.pre_norm
        stages.{}.blocks.{}.se_early.fc1 stages.{}.blocks.{}.se_early.fc2 stages.{}.blocks.{}.shortcut.expand
    """, """
        stages.{}.blocks.{}.attn.proj stages.{}.blocks.{}.attn.qkv
        stages.{}.blocks.{}.attn.rel_pos.relative_position_bias_table stages.{}.blocks.{}.conv.norm
        stages.{}.blocks.{}.conv_dw stages.{}.blocks.{}.ls.gamma stages.{}.blocks.{}.ls1.gamma
        stages.{}.blocks.{}.ls2.gamma stages.{}.blocks.{}.mlp.fc1 stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm
        stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm1.norm stages.{}.blocks.{}.norm2 stages.{}.blocks.{}.se.fc1
        stages.{}.blocks.{}.se.fc2
    """),
    ("mlp_mixer", "MLP-Mixer, ResMLP, and gMLP in PyTorch", """
        gmixer_12_224 gmixer_24_224 gmlp_b16_224 gmlp_s16_224 gmlp_ti16_224 mixer_b16_224 mixer_b32_224 mixer_l16_224
        mixer_l32_224 mixer_s16_224 mixer_s32_224 resmlp_12_224 resmlp_24_224 resmlp_36_224 resmlp_big_24_224
    """, """
        blocks.{}.linear_tokens blocks.{}.ls1 blocks.{}.ls2 blocks.{}.mlp_channels.fc1 blocks.{}.mlp_channels.fc2
        blocks.{}.mlp_channels.gate.proj blocks.{}.mlp_tokens.fc1 blocks.{}.mlp_tokens.fc2 blocks.{}.norm1.alpha
        blocks.{}.norm1.beta blocks.{}.norm2.alpha blocks.{}.norm2.beta
    """, """
        blocks.{}.mlp_channels.gate.norm blocks.{}.norm
    """),
    ("mobilevit", "MobileViT", """
        mobilevit_s mobilevit_xs mobilevit_xxs mobilevitv2_050 mobilevitv2_075 mobilevitv2_100 mobilevitv2_125
        mobilevitv2_150 mobilevitv2_175 mobilevitv2_200
    """, """
        stages.{}.{}.conv_1x1 stages.{}.{}.conv_fusion.bn stages.{}.{}.conv_fusion.conv stages.{}.{}.conv_proj.bn
        stages.{}.{}.conv_proj.conv stages.{}.{}.transformer.{}.attn.out_proj stages.{}.{}.transformer.{}.attn.proj
        stages.{}.{}.transformer.{}.attn.qkv stages.{}.{}.transformer.{}.attn.qkv_proj
        stages.{}.{}.transformer.{}.mlp.fc1 stages.{}.{}.transformer.{}.mlp.fc2 stages.{}.{}.transformer.{}.norm1
        stages.{}.{}.transformer.{}.norm2
    """, """
        stages.{}.{}.conv1_1x1.bn stages.{}.{}.conv1_1x1.conv stages.{}.{}.conv2_kxk.bn stages.{}.{}.conv2_kxk.conv
        stages.{}.{}.conv3_1x1.bn stages.{}.{}.conv3_1x1.conv stages.{}.{}.conv_kxk.bn stages.{}.{}.conv_kxk.conv
        stages.{}.{}.norm
    """),
    ("mvitv2", "Multi-Scale Vision Transformer v2", """
        mvitv2_base mvitv2_base_cls mvitv2_huge_cls mvitv2_large mvitv2_large_cls mvitv2_small mvitv2_small_cls
        mvitv2_tiny
    """, """
        stages.{}.blocks.{}.attn.norm_k stages.{}.blocks.{}.attn.norm_q stages.{}.blocks.{}.attn.norm_v
        stages.{}.blocks.{}.attn.pool_k stages.{}.blocks.{}.attn.pool_q stages.{}.blocks.{}.attn.pool_v
        stages.{}.blocks.{}.attn.rel_pos_h stages.{}.blocks.{}.attn.rel_pos_w stages.{}.blocks.{}.shortcut_proj_attn
        stages.{}.blocks.{}.shortcut_proj_mlp
    """, """
        stages.{}.blocks.{}.attn.proj stages.{}.blocks.{}.attn.qkv stages.{}.blocks.{}.mlp.fc1
        stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm2
    """),
    ("nest", "Nested Transformer (NesT) in PyTorch", """
        nest_base nest_base_jx nest_small nest_small_jx nest_tiny nest_tiny_jx
    """, """
        levels.{}.pool.conv levels.{}.transformer_encoder.{}.attn.proj levels.{}.transformer_encoder.{}.attn.qkv
        levels.{}.transformer_encoder.{}.mlp.fc1 levels.{}.transformer_encoder.{}.mlp.fc2
        levels.{}.transformer_encoder.{}.norm1 levels.{}.transformer_encoder.{}.norm2
    """, """
        levels.{}.pool.norm levels.{}.pos_embed
    """),
    ("nextvit", "Next-ViT", """
        nextvit_base nextvit_large nextvit_small
    """, """
        stages.{}.blocks.{}.e_mhsa.k stages.{}.blocks.{}.e_mhsa.proj stages.{}.blocks.{}.e_mhsa.q
        stages.{}.blocks.{}.e_mhsa.v stages.{}.blocks.{}.mhca.group_conv3x3 stages.{}.blocks.{}.mhca.projection
        stages.{}.blocks.{}.patch_embed.conv stages.{}.blocks.{}.projection.conv
    """, """
        stages.{}.blocks.{}.e_mhsa.norm stages.{}.blocks.{}.mhca.norm stages.{}.blocks.{}.mlp.fc1
        stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm2
        stages.{}.blocks.{}.patch_embed.norm stages.{}.blocks.{}.projection.norm
    """),
    ("pit", "Pooling-based Vision Transformer (PiT) in PyTorch", """
        pit_b_224 pit_b_distilled_224 pit_s_224 pit_s_distilled_224 pit_ti_224 pit_ti_distilled_224 pit_xs_224
        pit_xs_distilled_224
    """, """
        transformers.{}.pool.conv transformers.{}.pool.fc
    """, """
        transformers.{}.blocks.{}.attn.proj transformers.{}.blocks.{}.attn.qkv transformers.{}.blocks.{}.mlp.fc1
        transformers.{}.blocks.{}.mlp.fc2 transformers.{}.blocks.{}.norm1 transformers.{}.blocks.{}.norm2
    """),
    ("pvt_v2", "Pyramid Vision Transformer v2", """
        pvt_v2_b0 pvt_v2_b1 pvt_v2_b2 pvt_v2_b2_li pvt_v2_b3 pvt_v2_b4 pvt_v2_b5
    """, """
        stages.{}.blocks.{}.attn.kv stages.{}.blocks.{}.attn.q stages.{}.blocks.{}.attn.sr
        stages.{}.blocks.{}.mlp.dwconv
    """, """
        stages.{}.blocks.{}.attn.norm stages.{}.blocks.{}.attn.proj stages.{}.blocks.{}.mlp.fc1
        stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm2 stages.{}.downsample.norm
        stages.{}.downsample.proj stages.{}.norm
    """),
    ("qwen3_vit", "Qwen3 Vision Transformer", """
        qwen3_vit_88m qwen3_vit_88m_enc qwen3_vit_88m_merge qwen3_vit_306m qwen3_vit_306m_enc qwen3_vit_306m_merge
        qwen3_vit_416m qwen3_vit_416m_enc qwen3_vit_416m_merge
    """, "", ""),
    ("sequencer", "Sequencer", """
        sequencer2d_l sequencer2d_m sequencer2d_s
    """, """
        stages.{}.blocks.{}.mlp_channels.fc1 stages.{}.blocks.{}.mlp_channels.fc2 stages.{}.blocks.{}.rnn_tokens.fc
        stages.{}.blocks.{}.rnn_tokens.rnn_h.bias_hh_l0 stages.{}.blocks.{}.rnn_tokens.rnn_h.bias_hh_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_h.bias_ih_l0 stages.{}.blocks.{}.rnn_tokens.rnn_h.bias_ih_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_h.weight_hh_l0 stages.{}.blocks.{}.rnn_tokens.rnn_h.weight_hh_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_h.weight_ih_l0 stages.{}.blocks.{}.rnn_tokens.rnn_h.weight_ih_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_v.bias_hh_l0 stages.{}.blocks.{}.rnn_tokens.rnn_v.bias_hh_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_v.bias_ih_l0 stages.{}.blocks.{}.rnn_tokens.rnn_v.bias_ih_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_v.weight_hh_l0 stages.{}.blocks.{}.rnn_tokens.rnn_v.weight_hh_l0_reverse
        stages.{}.blocks.{}.rnn_tokens.rnn_v.weight_ih_l0 stages.{}.blocks.{}.rnn_tokens.rnn_v.weight_ih_l0_reverse
        stages.{}.downsample.down
    """, """
        stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm2
    """),
    ("shvit", "SHViT", """
        shvit_s1 shvit_s2 shvit_s3 shvit_s4
    """, """
        stages.{}.blocks.{}.conv.m.bn stages.{}.blocks.{}.conv.m.c stages.{}.blocks.{}.ffn.m.pw1.bn
        stages.{}.blocks.{}.ffn.m.pw1.c stages.{}.blocks.{}.ffn.m.pw2.bn stages.{}.blocks.{}.ffn.m.pw2.c
        stages.{}.blocks.{}.mixer.m.pre_norm stages.{}.blocks.{}.mixer.m.proj.{}.bn
        stages.{}.blocks.{}.mixer.m.proj.{}.c stages.{}.blocks.{}.mixer.m.qkv.bn stages.{}.blocks.{}.mixer.m.qkv.c
        stages.{}.downsample.{}.conv1.bn stages.{}.downsample.{}.conv1.c stages.{}.downsample.{}.conv2.bn
        stages.{}.downsample.{}.conv2.c stages.{}.downsample.{}.conv3.bn stages.{}.downsample.{}.conv3.c
        stages.{}.downsample.{}.m.bn stages.{}.downsample.{}.m.c stages.{}.downsample.{}.m.pw1.bn
        stages.{}.downsample.{}.m.pw1.c stages.{}.downsample.{}.m.pw2.bn stages.{}.downsample.{}.m.pw2.c
        stages.{}.downsample.{}.se.fc1 stages.{}.downsample.{}.se.fc2
    """, ""),
    ("swin_transformer", "Swin Transformer", """
        swin_base_patch4_window7_224 swin_base_patch4_window12_384 swin_large_patch4_window7_224
        swin_large_patch4_window12_384 swin_s3_base_224 swin_s3_small_224 swin_s3_tiny_224 swin_small_patch4_window7_224
        swin_tiny_patch4_window7_224
    """, """
        layers.{}.blocks.{}.attn.relative_position_bias_table
    """, """
        layers.{}.blocks.{}.attn.proj layers.{}.blocks.{}.attn.qkv layers.{}.blocks.{}.mlp.fc1
        layers.{}.blocks.{}.mlp.fc2 layers.{}.blocks.{}.norm1 layers.{}.blocks.{}.norm2 layers.{}.downsample.norm
        layers.{}.downsample.reduction
    """),
    ("swin_transformer_v2", "Swin Transformer V2", """
        swinv2_base_window8_256 swinv2_base_window12_192 swinv2_base_window12to16_192to256
        swinv2_base_window12to24_192to384 swinv2_base_window16_256 swinv2_large_window12_192
        swinv2_large_window12to16_192to256 swinv2_large_window12to24_192to384 swinv2_small_window8_256
        swinv2_small_window16_256 swinv2_tiny_window8_256 swinv2_tiny_window16_256
    """, """
        layers.{}.blocks.{}.attn.cpb_mlp.{} layers.{}.blocks.{}.attn.logit_scale layers.{}.blocks.{}.attn.q_bias
        layers.{}.blocks.{}.attn.v_bias
    """, """
        layers.{}.blocks.{}.attn.proj layers.{}.blocks.{}.attn.qkv layers.{}.blocks.{}.mlp.fc1
        layers.{}.blocks.{}.mlp.fc2 layers.{}.blocks.{}.norm1 layers.{}.blocks.{}.norm2 layers.{}.downsample.norm
        layers.{}.downsample.reduction
    """),
    ("swin_transformer_v2_cr", "Swin Transformer V2", """
        swinv2_cr_base_224 swinv2_cr_base_384 swinv2_cr_base_ns_224 swinv2_cr_giant_224 swinv2_cr_giant_384
        swinv2_cr_huge_224 swinv2_cr_huge_384 swinv2_cr_large_224 swinv2_cr_large_384 swinv2_cr_small_224
        swinv2_cr_small_384 swinv2_cr_small_ns_224 swinv2_cr_small_ns_256 swinv2_cr_tiny_224 swinv2_cr_tiny_384
        swinv2_cr_tiny_ns_224
    """, """
        stages.{}.blocks.{}.attn.logit_scale stages.{}.blocks.{}.attn.meta_mlp.fc1 stages.{}.blocks.{}.attn.meta_mlp.fc2
    """, """
        stages.{}.blocks.{}.attn.proj stages.{}.blocks.{}.attn.qkv stages.{}.blocks.{}.mlp.fc1
        stages.{}.blocks.{}.mlp.fc2 stages.{}.blocks.{}.norm1 stages.{}.blocks.{}.norm2 stages.{}.blocks.{}.norm3
        stages.{}.downsample.norm stages.{}.downsample.reduction
    """),
    ("tiny_vit", "TinyViT", """
        tiny_vit_5m_224 tiny_vit_11m_224 tiny_vit_21m_224 tiny_vit_21m_384 tiny_vit_21m_512
    """, """
        stages.{}.blocks.{}.local_conv.bn stages.{}.blocks.{}.local_conv.conv stages.{}.downsample.conv1.bn
        stages.{}.downsample.conv1.conv stages.{}.downsample.conv2.bn stages.{}.downsample.conv2.conv
        stages.{}.downsample.conv3.bn stages.{}.downsample.conv3.conv
    """, """
        stages.{}.blocks.{}.attn.attention_biases stages.{}.blocks.{}.attn.norm stages.{}.blocks.{}.attn.proj
        stages.{}.blocks.{}.attn.qkv stages.{}.blocks.{}.conv1.bn stages.{}.blocks.{}.conv1.conv
        stages.{}.blocks.{}.conv2.bn stages.{}.blocks.{}.conv2.conv stages.{}.blocks.{}.conv3.bn
        stages.{}.blocks.{}.conv3.conv stages.{}.blocks.{}.mlp.fc1 stages.{}.blocks.{}.mlp.fc2
        stages.{}.blocks.{}.mlp.norm
    """),
    ("tnt", "Transformer in Transformer (TNT) in PyTorch", """
        tnt_b_patch16_224 tnt_s_legacy_patch16_224 tnt_s_patch16_224
    """, """
        blocks.{}.attn_in.proj blocks.{}.attn_in.qk blocks.{}.attn_in.v blocks.{}.attn_out.proj blocks.{}.attn_out.qk
        blocks.{}.attn_out.v blocks.{}.mlp_in.fc1 blocks.{}.mlp_in.fc2 blocks.{}.norm1_proj blocks.{}.norm2_proj
        blocks.{}.norm_in blocks.{}.norm_mlp blocks.{}.norm_mlp_in blocks.{}.norm_out
    """, """
        blocks.{}.proj
    """),
    ("twins", "Twins", """
        twins_pcpvt_base twins_pcpvt_large twins_pcpvt_small twins_svt_base twins_svt_large twins_svt_small
    """, """
        blocks.{}.{}.attn.kv blocks.{}.{}.attn.proj blocks.{}.{}.attn.q blocks.{}.{}.attn.qkv blocks.{}.{}.attn.sr
        blocks.{}.{}.mlp.fc1 blocks.{}.{}.mlp.fc2 blocks.{}.{}.norm1 blocks.{}.{}.norm2 patch_embeds.{}.proj
        pos_block.{}.proj.{}
    """, """
        blocks.{}.{}.attn.norm patch_embeds.{}.norm
    """),
    ("visformer", "Visformer", """
        visformer_small visformer_tiny
    """, """
        stage1.{}.mlp.conv1 stage1.{}.mlp.conv2 stage1.{}.mlp.conv3 stage1.{}.norm2 stage2.{}.attn.proj
        stage2.{}.attn.qkv stage2.{}.mlp.conv1 stage2.{}.mlp.conv3 stage2.{}.norm1 stage2.{}.norm2 stage3.{}.attn.proj
        stage3.{}.attn.qkv stage3.{}.mlp.conv1 stage3.{}.mlp.conv3 stage3.{}.norm1 stage3.{}.norm2
    """, ""),
    ("vision_transformer_hybrid", "Hybrid Vision Transformer (ViT) in PyTorch", """
        vit_base_mci_224 vit_base_resnet26d_224 vit_base_resnet50d_224 vit_small_resnet26d_224
        vit_small_resnet50d_s16_224
    """, """
        patch_embed.backbone.conv1.{} patch_embed.backbone.layer1.{}.bn1 patch_embed.backbone.layer1.{}.bn2
        patch_embed.backbone.layer1.{}.bn3 patch_embed.backbone.layer1.{}.conv1 patch_embed.backbone.layer1.{}.conv2
        patch_embed.backbone.layer1.{}.conv3 patch_embed.backbone.layer1.{}.downsample.{}
        patch_embed.backbone.layer2.{}.bn1 patch_embed.backbone.layer2.{}.bn2 patch_embed.backbone.layer2.{}.bn3
        patch_embed.backbone.layer2.{}.conv1 patch_embed.backbone.layer2.{}.conv2 patch_embed.backbone.layer2.{}.conv3
        patch_embed.backbone.layer2.{}.downsample.{} patch_embed.backbone.layer3.{}.bn1
        patch_embed.backbone.layer3.{}.bn2 patch_embed.backbone.layer3.{}.bn3 patch_embed.backbone.layer3.{}.conv1
        patch_embed.backbone.layer3.{}.conv2 patch_embed.backbone.layer3.{}.conv3
        patch_embed.backbone.layer3.{}.downsample.{} patch_embed.backbone.layer4.{}.bn1
        patch_embed.backbone.layer4.{}.bn2 patch_embed.backbone.layer4.{}.bn3 patch_embed.backbone.layer4.{}.conv1
        patch_embed.backbone.layer4.{}.conv2 patch_embed.backbone.layer4.{}.conv3
        patch_embed.backbone.layer4.{}.downsample.{} patch_embed.backbone.{}.bn patch_embed.backbone.{}.conv
    """, """
        patch_embed.backbone.bn1
    """),
    ("vision_transformer_sam", "the image encoder of Segment Anything, a ViTDet", """
        samvit_base_patch16 samvit_base_patch16_224 samvit_huge_patch16 samvit_large_patch16
    """, """
        blocks.{}.attn.rel_pos_h blocks.{}.attn.rel_pos_w
    """, ""),
    ("vitamin", "ViTamin", """
        vitamin_base_224 vitamin_large2_224 vitamin_large2_256 vitamin_large2_336 vitamin_large2_384 vitamin_large_224
        vitamin_large_256 vitamin_large_336 vitamin_large_384 vitamin_small_224 vitamin_xlarge_256 vitamin_xlarge_336
        vitamin_xlarge_384
    """, """
        blocks.{}.mlp.w0 blocks.{}.mlp.w1 blocks.{}.mlp.w2 patch_embed.backbone.stages.{}.{}.conv1_1x1
        patch_embed.backbone.stages.{}.{}.conv2_kxk patch_embed.backbone.stages.{}.{}.conv3_1x1
        patch_embed.backbone.stages.{}.{}.pre_norm patch_embed.backbone.stages.{}.{}.shortcut.expand
    """, """
        patch_embed.backbone.pool.norm patch_embed.backbone.pool.proj patch_embed.backbone.stem.conv1
        patch_embed.backbone.stem.conv2 patch_embed.backbone.stem.norm1
    """),
    ("volo", "Vision OutLOoker (VOLO) implementation", """
        volo_d1_224 volo_d1_384 volo_d2_224 volo_d2_384 volo_d3_224 volo_d3_448 volo_d4_224 volo_d4_448 volo_d5_224
        volo_d5_448 volo_d5_512
    """, """
        network.{}.proj network.{}.{}.attn.attn network.{}.{}.attn.proj network.{}.{}.attn.qkv network.{}.{}.attn.v
        network.{}.{}.mlp.fc1 network.{}.{}.mlp.fc2 network.{}.{}.norm1 network.{}.{}.norm2 post_network.{}.attn.kv
        post_network.{}.attn.proj post_network.{}.attn.q post_network.{}.mlp.fc1 post_network.{}.mlp.fc2
        post_network.{}.norm1 post_network.{}.norm2
    """, ""),
    ("xcit", "Cross-Covariance Image Transformer (XCiT) in PyTorch", """
        xcit_large_24_p8_224 xcit_large_24_p8_384 xcit_large_24_p16_224 xcit_large_24_p16_384 xcit_medium_24_p8_224
        xcit_medium_24_p8_384 xcit_medium_24_p16_224 xcit_medium_24_p16_384 xcit_nano_12_p8_224 xcit_nano_12_p8_384
        xcit_nano_12_p16_224 xcit_nano_12_p16_384 xcit_small_12_p8_224 xcit_small_12_p8_384 xcit_small_12_p16_224
        xcit_small_12_p16_384 xcit_small_24_p8_224 xcit_small_24_p8_384 xcit_small_24_p16_224 xcit_small_24_p16_384
        xcit_tiny_12_p8_224 xcit_tiny_12_p8_384 xcit_tiny_12_p16_224 xcit_tiny_12_p16_384 xcit_tiny_24_p8_224
        xcit_tiny_24_p8_384 xcit_tiny_24_p16_224 xcit_tiny_24_p16_384
    """, """
        blocks.{}.attn.temperature blocks.{}.gamma1 blocks.{}.gamma2 blocks.{}.gamma3 blocks.{}.local_mp.bn
        blocks.{}.local_mp.conv1 blocks.{}.local_mp.conv2 cls_attn_blocks.{}.attn.k cls_attn_blocks.{}.attn.proj
        cls_attn_blocks.{}.attn.q cls_attn_blocks.{}.attn.v cls_attn_blocks.{}.gamma1 cls_attn_blocks.{}.gamma2
        cls_attn_blocks.{}.mlp.fc1 cls_attn_blocks.{}.mlp.fc2 cls_attn_blocks.{}.norm1 cls_attn_blocks.{}.norm2
    """, """
        blocks.{}.norm3
    """),
]  # fmt: skip

FAMILIES = {
    file: Family(title, tuple(names.split()), frozenset(marks.split()), frozenset(others.split()))
    for file, title, names, marks, others in _FAMILIES
}
