"""Kernels and bytes of programs for a GPU, against bytes counted by hand."""

import pytest

from electra_jax.cost import traffic

PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_slice (p0: f32[12,4,8], p1: s32[]) -> bf16[4,8] {
  %p0 = f32[12,4,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,4,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,4,8}
  %flat = f32[4,8]{1,0} bitcast(%part)
  ROOT %rounded = bf16[4,8]{1,0} convert(%flat)
}

%fused_update (p0.1: f32[12,4,8], p1.1: f32[4,8], p2: s32[]) -> (f32[12,4,8], f32[4]) {
  %p0.1 = f32[12,4,8]{2,1,0} parameter(0)
  %p1.1 = f32[4,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %nought = f32[] constant(0)
  %layer = f32[1,4,8]{2,1,0} bitcast(%p1.1)
  %new = f32[12,4,8]{2,1,0} dynamic-update-slice(%p0.1, %layer, %p2, %zero.1, %zero.1)
  %sums = f32[4]{0} reduce(%p1.1, %nought), dimensions={1}, to_apply=%add
  ROOT %both = (f32[12,4,8]{2,1,0}, f32[4]{0}) tuple(%new, %sums)
}

%fused_gather (table: f32[100,8], ids: s32[5,1]) -> f32[5,8] {
  %table = f32[100,8]{1,0} parameter(0)
  %ids = s32[5,1]{1,0} parameter(1)
  ROOT %rows = f32[5,8]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,8}
}

%fused_scatter (table.1: f32[100,8], ids.1: s32[5,1], rows.1: f32[5,8]) -> f32[100,8] {
  %table.1 = f32[100,8]{1,0} parameter(0)
  %ids.1 = s32[5,1]{1,0} parameter(1)
  %rows.1 = f32[5,8]{1,0} parameter(2)
  ROOT %added = f32[100,8]{1,0} scatter(%table.1, %ids.1, %rows.1), to_apply=%add
}

%fused_dot (a: bf16[4,8], b: bf16[8,16]) -> f32[4,16] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[12,4,8], f32[4,8])) -> (s32[], f32[12,4,8], f32[4,8]) {
  %state = (s32[], f32[12,4,8]{2,1,0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[12,4,8]{2,1,0} get-tuple-element(%state), index=1
  %x.1 = f32[4,8]{1,0} get-tuple-element(%state), index=2
  %cut = bf16[4,8]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %put = (f32[12,4,8]{2,1,0}, f32[4]{0}) fusion(%stack, %x.1, %i), kind=kInput, calls=%fused_update
  %stack.1 = f32[12,4,8]{2,1,0} get-tuple-element(%put), index=0
  ROOT %out = (s32[], f32[12,4,8]{2,1,0}, f32[4,8]{1,0}) tuple(%i, %stack.1, %x.1)
}

%condition (state.1: (s32[], f32[12,4,8], f32[4,8])) -> pred[] {
  %state.1 = (s32[], f32[12,4,8]{2,1,0}, f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %last = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %last), direction=LT
}

%graph (q: bf16[4,8], r: bf16[8,16]) -> f32[4,16] {
  %q = bf16[4,8]{1,0} parameter(0)
  %r = bf16[8,16]{1,0} parameter(1)
  ROOT %product = f32[4,16]{1,0} fusion(%q, %r), kind=kCustom, calls=%fused_dot
}

ENTRY %main (w: f32[100,8], n: s32[5,1], h: bf16[4,8], k: bf16[8,16]) -> (f32[100,8], f32[4,16]) {
  %w = f32[100,8]{1,0} parameter(0), metadata={op_name="state[\\"w\\"]"}
  %n = s32[5,1]{1,0} parameter(1)
  %h = bf16[4,8]{1,0} parameter(2)
  %k = bf16[8,16]{1,0} parameter(3)
  %none = s32[] constant(0)
  %long = f32[12,4,8]{2,1,0} copy(%none)
  %wide = f32[4,8]{1,0} convert(%h)
  %start = (s32[], f32[12,4,8]{2,1,0}, f32[4,8]{1,0}) tuple(%none, %long, %wide)
  %loop = (s32[], f32[12,4,8]{2,1,0}, /*index=2*/f32[4,8]{1,0}) while(%start), \
condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %rows.2 = f32[5,8]{1,0} fusion(%w, %n), kind=kLoop, calls=%fused_gather
  %table.2 = f32[100,8]{1,0} fusion(%w, %n, %rows.2), kind=kInput, calls=%fused_scatter
  %gemm = (f32[4,16]{1,0}, s8[4096]{0}) custom-call(%h, %k), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"lhs_contracting_dimensions":["1"],"beta":0}}
  %flat.1 = f32[4,16]{1,0} get-tuple-element(%gemm), index=0
  %called = f32[4,16]{1,0} call(%h, %k), to_apply=%graph
  %sum-start = f32[100,8]{1,0} all-reduce-start(%table.2), to_apply=%add
  %sum-done = f32[100,8]{1,0} all-reduce-done(%sum-start)
  ROOT %end = (f32[100,8]{1,0}, f32[4,16]{1,0}) tuple(%sum-done, %called)
}
"""
TABLE, STACK, LAYER = 100 * 8 * 4, 12 * 4 * 8 * 4, 4 * 8 * 4
BY_HAND = {  # bytes read and written
  "long": 4 + STACK,
  "wide": LAYER // 2 + LAYER,
  "cut": LAYER + 4 + LAYER // 2,  # one layer of twelve
  "put": LAYER + 4 + LAYER + 4 * 4,  # the stack is neither read nor written but for one layer
  "less": 4 + 4 + 1,
  "rows.2": 5 * 8 * 4 + 5 * 4 + 5 * 8 * 4,  # five rows of a hundred
  "table.2": 5 * 4 + 3 * 5 * 8 * 4,  # reads what is added, and the old rows; writes new rows
  "gemm": 4 * 8 * 2 + 8 * 16 * 2 + 4 * 16 * 4,  # no scratch memory
  "product": 4 * 8 * 2 + 8 * 16 * 2 + 4 * 16 * 4,
  "sum-start": 2 * TABLE,
}
IN_THE_LOOP = {"cut", "put", "less"}


def test_every_kernel_moves_the_bytes_counted_by_hand():
  found = traffic.kernels(PROGRAM)
  assert {k.name: k.moved for k in found} == pytest.approx(BY_HAND)


def test_a_loop_launches_its_kernels_in_every_round():
  found = traffic.kernels(PROGRAM)
  assert {k.name for k in found if k.times == 3} == IN_THE_LOOP
  assert {k.times for k in found if k.name not in IN_THE_LOOP} == {1}
  assert traffic.launches(found) == 7 + 3 * 3
  total = sum(size * (3 if name in IN_THE_LOOP else 1) for name, size in BY_HAND.items())
  assert traffic.moved_bytes(found) == pytest.approx(total)


def test_products_are_counted_in_fusions_and_in_calls_of_a_library():
  flops = {k.name: k.flops for k in traffic.kernels(PROGRAM)}
  assert flops.pop("gemm") == flops.pop("product") == 2 * 4 * 8 * 16
  assert set(flops.values()) == {0}


def test_an_update_of_what_the_fusion_computes_writes_the_whole_array():
  computed = PROGRAM.replace("dynamic-update-slice(%p0.1,", "dynamic-update-slice(%fresh,").replace(
    "  %new =", "  %fresh = f32[12,4,8]{2,1,0} negate(%p0.1)\n  %new ="
  )
  (put,) = (k for k in traffic.kernels(computed) if k.name == "put")
  assert put.moved == STACK + LAYER + 4 + STACK + 4 * 4


def test_the_estimate_adds_launches_to_the_slower_of_memory_and_products():
  slow = traffic.Kernel("slow", 2, 3e9, int(1e9))
  product = traffic.Kernel("product", 1, 3e9, int(1e13))
  secs = traffic.estimate_secs([slow, product], memory_rate=4.8e12, peak=989e12)
  by_hand = 2 * 3e9 / (traffic.MEMORY_SHARE * 4.8e12) + 1e13 / (traffic.PRODUCT_SHARE * 989e12)
  assert secs == pytest.approx(by_hand + 3 * traffic.LAUNCH_SECS)
