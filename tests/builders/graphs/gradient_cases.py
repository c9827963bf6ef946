"""More cases for test_gradient_rules.py, in its notation: activations, shapes, indices, products."""

SCATTERED = "d[3,4] a, d[2,4] b | s = [2,0,1,2,0,1,2,1] n = [2,4] i = Reshape (s, n) y ="
TUPLES = "d[3,4] a, d[2,4] b | s = [2,0] n = [2,1] i = Reshape (s, n) y ="

DOUBLE = {
    "DFT": "d[2,5,3,1] a | y = DFT (a)",
    "DFT_axis": "d[2,5,3,2] a | n = Constant <value_int = 4> () i = Constant <value_int = 1> () "
    "y = DFT (a, n, i)",
    "DFT_onesided": "d[2,6,1] a | y = DFT <onesided = 1> (a)",
    "DFT_inverse": "d[2,5,2] a | y = DFT <inverse = 1> (a)",
    "SequenceAt": "d[3,4] a | s = SplitToSequence <axis = 1, keepdims = 0> (a) "
    "n = Constant <value_int = -2> () y = SequenceAt (s, n)",
    "SplitToSequence_chunks": "d[5,2] a | n = Constant <value_int = 2> () s = SplitToSequence (a, n) "
    "m = SequenceLength (s) i = Sub (m, n) b = SequenceAt (s, n) c = ConcatFromSequence <axis = 0> (s) "
    "e = Add (c, b) f = Cast <to = 11> (i) g = Mul (e, f) t = [5,2] "
    "y = Reshape (g, t)",
    "SplitToSequence_lengths": "d[5,2] a | n = [1,4] s = SplitToSequence (a, n) "
    "i = Constant <value_int = 1> () b = SequenceAt (s, i) c = Mul (b, b) t = [4,2] y = Reshape (c, t)",
    "SequenceInsert": "d[2,3] a, d[2,3] b | s = SequenceConstruct (a, b) n = Constant <value_int = 0> () "
    "t = SequenceErase (s, n) c = Mul (a, a) u = SequenceInsert (t, c, n) v = SequenceInsert (u, b) "
    "w = ConcatFromSequence <axis = 1, new_axis = 1> (v) r = [2,3,3] y = Reshape (w, r)",
    "OptionalGetElement": "d[2,3] a | o = Optional (a) b = OptionalGetElement (o) y = Mul (b, b)",
    "STFT": "d[2,12,1] a, d[4] b | n = Constant <value_int = 3> () l = Constant <value_int = 4> () "
    "y = STFT <onesided = 1> (a, n, b, l)",
    "STFT_both_sides": "d[1,9,1] a | n = Constant <value_int = 2> () l = Constant <value_int = 4> () "
    "y = STFT <onesided = 0> (a, n, , l)",
    "Mod": "d[3,4] a, d[4] p | y = Mod <fmod = 1> (a, p)",
    "Pow_square": "d[3,4] a | n = Constant <value = double {2}> () y = Pow (a, n)",
    "Pow_one": "d[3,4] a | n = Constant <value = double {1}> () y = Pow (a, n)",
    "Pow_zero": "d[3,4] a | n = Constant <value = double {0}> () y = Pow (a, n)",
    "Pow_root": "d[3,4] p | n = Constant <value = double {0.5}> () y = Pow (p, n)",
    "Pow_exponent_tensor": "d[3,1] p | n = Constant <value = double[3] {0, 1, -2}> () y = Pow (p, n)",
    "Max_one": "d[3,4] a | y = Max (a)",
    "Sum_one": "d[3,4] a | y = Sum (a)",
    "Where_broadcast": "d[3,1] a, d[4] b | m = Less (a, b) y = Where (m, a, b)",
    "ReduceProd": "d[2,3,4] a | s = [-2] y = ReduceProd <keepdims = 0> (a, s)",
    "ReduceProd_one_zero": "d[2,3] a | t = Constant <value = double[3] {1, 0, 2}> () "
    "b = Mul (a, t) s = [1] y = ReduceProd (b, s)",
    "ReduceProd_two_zeros": "d[2,3] a | t = Constant <value = double[3] {0, 0, 2}> () "
    "b = Mul (a, t) s = [1] y = ReduceProd (b, s)",
    "ReduceProd_all": "d[2,3] a | y = ReduceProd (a)",
    "ReduceProd_nothing": "d[2,3] a | y = ReduceProd <noop_with_empty_axes = 1> (a)",
    "ReduceMin_nothing": "d[2,3] a | y = ReduceMin <noop_with_empty_axes = 1> (a)",
    "ReduceL1_nothing": "d[2,3] a | y = ReduceL1 <noop_with_empty_axes = 1> (a)",
    "ReduceL2_nothing": "d[2,3] a | y = ReduceL2 <noop_with_empty_axes = 1> (a)",
    "ReduceLogSum_nothing": "d[2,3] p | y = ReduceLogSum <noop_with_empty_axes = 1> (p)",
    "ReduceLogSumExp_nothing": "d[2,3] a | y = ReduceLogSumExp <noop_with_empty_axes = 1> (a)",
    "ReduceSumSquare_nothing": "d[2,3] a | y = ReduceSumSquare <noop_with_empty_axes = 1> (a)",
    "ReduceLogSum_all": "d[2,3] p | y = ReduceLogSum (p)",
    "ReduceLogSumExp_all": "d[2,3] a | y = ReduceLogSumExp <keepdims = 0> (a)",
    "ReduceL1_all": "d[2,3] a | y = ReduceL1 <keepdims = 0> (a)",
    "ReduceL2_all": "d[2,3] a | y = ReduceL2 <keepdims = 0> (a)",
    "CumSum": "d[3,4] a | n = Constant <value_int = 1> () y = CumSum (a, n)",
    "CumSum_exclusive": "d[3,4] a | n = Constant <value_int = -1> () y = CumSum <exclusive = 1> (a, n)",
    "CumSum_reverse": "d[3,4] a | n = Constant <value_int = 0> () y = CumSum <reverse = 1> (a, n)",
    "CumSum_reverse_exclusive": "d[3,4] a | n = Constant <value_int = 0> () "
    "y = CumSum <reverse = 1, exclusive = 1> (a, n)",
    "LogSoftmax_first_axis": "d[3,4] a | y = LogSoftmax <axis = -2> (a)",
    "Reshape_empty": "d[2,3] a, d[0,3] b | s = [3,0] c = Reshape <allowzero = 1> (b, s) "
    "t = [0,1] r = ReduceSum <keepdims = 0> (c, t) y = Add (a, r)",
    "Tile": "d[2,3] a | s = [2,3] y = Tile (a, s)",
    "Tile_one_axis": "d[2,1,3] a | s = [1,2,1] y = Tile (a, s)",
    "Tile_nothing": "d[2,3] a | s = [1,1] y = Tile (a, s)",
    "Tile_computed": "d[2,3] a, long[2] i | n = Constant <value_int = 1> () s = Add (i, n) "
    "b = Tile (a, s) c = Mul (b, b) y = ReduceSum <keepdims = 0> (c)",
    "DepthToSpace": "d[2,12,2,3] a | y = DepthToSpace <blocksize = 2> (a)",
    "DepthToSpace_columns": 'd[1,8,2,3] a | y = DepthToSpace <blocksize = 2, mode = "CRD"> (a)',
    "SpaceToDepth": "d[2,3,4,6] a | y = SpaceToDepth <blocksize = 2> (a)",
    "ReverseSequence": "d[4,3,2] a | s = [2,4,1] y = ReverseSequence (a, s)",
    "ReverseSequence_axes": "d[3,4] a | s = [2,4,1] "
    "y = ReverseSequence <batch_axis = 0, time_axis = 1> (a, s)",
    "Slice_two_steps": "d[5,6] a | s = [4,0] e = [-9,6] x = [0,-1] t = [-2,3] y = Slice (a, s, e, x, t)",
    "Slice_far": "d[5,6] a | s = [-99,1] e = [99,99] y = Slice (a, s, e)",
    "Slice_nothing": "d[5] a, d[2] b | s = [3] e = [3] c = Slice (a, s, e) y = Concat <axis = 0> (c, b)",
    "Slice_nothing_stepped": "d[5] a, d[2] b | s = [3] e = [3] x = [0] t = [2] "
    "c = Slice (a, s, e, x, t) y = Concat <axis = 0> (c, b)",
    "Slice_computed": "d[7,4] a, long[2] i | e = [7,4] b = Slice (a, i, e) c = Mul (b, b) "
    "y = ReduceSum <keepdims = 0> (c)",
    "Slice_computed_steps": "d[7,4] a, long[1] i | e = [-9] x = [0] t = [-2] n = Constant <value_int = 4> () "
    "s = Add (i, n) b = Slice (a, s, e, x, t) c = Mul (b, b) y = ReduceSum <keepdims = 0> (c)",
    "Pad_negative": "d[3,4] a | s = [-1,2,1,-1] y = Pad (a, s)",
    "Pad_axes": "d[3,4] a | s = [1,2] x = [-1] y = Pad (a, s, , x)",
    "Pad_reflect": 'd[3,4] a | s = [2,1,1,3] y = Pad <mode = "reflect"> (a, s)',
    "Pad_edge": 'd[3,4] a | s = [2,1,0,3] y = Pad <mode = "edge"> (a, s)',
    "Pad_edge_far": 'd[2,3] a | s = [0,9,0,8] y = Pad <mode = "edge"> (a, s)',
    "Pad_wrap": 'd[3,4] a | s = [2,1,1,3] y = Pad <mode = "wrap"> (a, s)',
    "CenterCropPad": "d[3,6] a | s = [5,3] y = CenterCropPad (a, s)",
    "CenterCropPad_axes": "d[3,6,4] a | s = [4,3] y = CenterCropPad <axes = [-1,1]> (a, s)",
    "Compress": "d[3,4] a | m = Constant <value = bool[3] {1, 0, 1}> () b = Compress <axis = -1> (a, m) "
    "c = Mul (b, b) y = ReduceSum <keepdims = 0> (c)",
    "Compress_flat": "d[3,2] a | m = Constant <value = bool[4] {0, 1, 0, 1}> () b = Compress (a, m) "
    "c = Mul (b, b) y = ReduceSum <keepdims = 0> (c)",
    "Gather_negative": "d[4,5] a | b = Neg (a) i = [-1,0,3,-1] y = Gather <axis = 1> (b, i)",
    "GatherND": "d[3,4,2] a | s = [2,1,0,3,2,1] n = [3,2] i = Reshape (s, n) y = GatherND (a, i)",
    "GatherND_rows": "d[3,4] a | s = [2,-1,0] n = [3,1] i = Reshape (s, n) y = GatherND (a, i)",
    "GatherND_batched": "d[2,3,4] a | s = [2,0,0,1,1,1] n = [2,3,1] i = Reshape (s, n) "
    "y = GatherND <batch_dims = 1> (a, i)",
    "GatherND_batched_twice": "d[2,2,4] a | s = [3,0,1,1] n = [2,2,1] i = Reshape (s, n) "
    "y = GatherND <batch_dims = 2> (a, i)",
    "ScatterElements": SCATTERED.replace("2,0,1,2,0,1,2,1", "2,0,1,2,0,1,2,0") + " ScatterElements (a, i, b)",
    "ScatterElements_add": SCATTERED + ' ScatterElements <reduction = "add"> (a, i, b)',
    "ScatterElements_mul": SCATTERED + ' ScatterElements <reduction = "mul"> (a, i, b)',
    "ScatterElements_max": SCATTERED + ' ScatterElements <reduction = "max"> (a, i, b)',
    "ScatterElements_min": SCATTERED + ' ScatterElements <reduction = "min"> (a, i, b)',
    "ScatterElements_axis": "d[2,4] a, d[2,2] b | s = [3,-3,0,2] n = [2,2] i = Reshape (s, n) "
    "y = ScatterElements <axis = -1> (a, i, b)",
    "ScatterElements_mul_zeros": "d[4] a, d[5] b | t = Constant <value = double[5] {0, 1, 0, 0, 1}> () "
    'c = Mul (b, t) i = [1,1,2,2,0] y = ScatterElements <reduction = "mul"> (a, i, c)',
    "ScatterND": TUPLES + " ScatterND (a, i, b)",
    "ScatterND_add": TUPLES.replace("2,0]", "2,2]") + ' ScatterND <reduction = "add"> (a, i, b)',
    "ScatterND_mul": TUPLES.replace("2,0]", "2,2]") + ' ScatterND <reduction = "mul"> (a, i, b)',
    "ScatterND_max": TUPLES.replace("2,0]", "2,2]") + ' ScatterND <reduction = "max"> (a, i, b)',
    "ScatterND_min": TUPLES.replace("2,0]", "2,2]") + ' ScatterND <reduction = "min"> (a, i, b)',
    "TopK": "d[3,5] a | s = [2] y, i = TopK (a, s)",
    "TopK_smallest": "d[5,3] a | s = [2] y, i = TopK <axis = 0, largest = 0> (a, s)",
    "Einsum_implicit": 'd[3,2] a, d[2,4] b | y = Einsum <equation = "ij, jk"> (a, b)',
    "Einsum_summed_alone": 'd[3,2] a, d[4] b | y = Einsum <equation = "ij,k->k"> (a, b)',
    "Einsum_ellipsis": 'd[2,3,4] a, d[2,4,5] b | y = Einsum <equation = "...ij,...jk->...ik"> (a, b)',
    "Einsum_ellipsis_broadcast": 'd[2,3,4] a, d[4,5] b | y = Einsum <equation = "...j,jk"> (a, b)',
    "Einsum_diagonal": 'd[3,3] a | y = Einsum <equation = "ii->i"> (a)',
    "Einsum_trace": 'd[2,3,3] a | y = Einsum <equation = "bii->b"> (a)',
    "Einsum_diagonal_product": 'd[3,2,3] a, d[3,2] b | y = Einsum <equation = "iji,ij->j"> (a, b)',
    "Einsum_three": 'd[3] a, d[3,4] b, d[4] c | y = Einsum <equation = "i,ij,j->"> (a, b, c)',
    "Einsum_transposed": 'd[3,4] a | b = Einsum <equation = "ij->ji"> (a) y = Mul (b, b)',
    "Einsum_same_twice": 'd[3,4] a | y = Einsum <equation = "ij,kj->ik"> (a, a)',
    "MatMul_column": "d[2,3,4] a, d[4,1] b | y = MatMul (a, b)",
    "MatMul_vector_left_matrix": "d[4] a, d[4,3] b | y = MatMul (a, b)",
    "MatMul_empty": "d[2,0] a, d[0,3] b | y = MatMul (a, b)",
    "Gemm_scalar": "d[3,4] a, d[4,2] b, d[1] c | y = Gemm <alpha = 2.0, beta = 3.0> (a, b, c)",
    "Concat_empty": "d[2,0] a, d[2,3] b | y = Concat <axis = 1> (a, b)",
    "Expand_empty": "d[3] a, d[2,3] b | s = [0,3] c = Expand (a, s) y = Concat <axis = 0> (c, b)",
}

FLOAT = {
    "DequantizeLinear_scale": "f[3] p, f[2,3] a | x = Constant <value = int8[2,3] {1, -7, 3, 90, 0, -128}> "
    "() z = Constant <value = int8[3] {1, 0, -5}> () "
    "b = DequantizeLinear <axis = -1> (x, p, z) y = Mul (a, b)",
    "DequantizeLinear_rows": "f[2] p, f[2,3] a | x = Constant <value = uint8[2,3] {1, 7, 3, 90, 0, 255}> () "
    "b = DequantizeLinear <axis = 0> (x, p) y = Mul (a, b)",
    "Det": "f[3,3] a | y = Det (a)",
    "Det_batched": "f[2,4,4] a | y = Det (a)",
    "Det_singular": "f[3,1] a, f[1,3] b | c = MatMul (a, b) y = Det (c)",
    "Det_one": "f[2,1,1] a | y = Det (a)",
    "Tan": "f[3,4] a | b = Sin (a) y = Tan (b)",
    "Sinh": "f[3,4] a | y = Sinh (a)",
    "Cosh": "f[3,4] a | y = Cosh (a)",
    "Asin": "f[3,4] a | b = Sin (a) y = Asin (b)",
    "Acos": "f[3,4] a | b = Sin (a) y = Acos (b)",
    "Atan": "f[3,4] a | y = Atan (a)",
    "Asinh": "f[3,4] a | y = Asinh (a)",
    "Acosh": "f[3,4] p | n = Constant <value = float {1}> () b = Add (p, n) y = Acosh (b)",
    "Atanh": "f[3,4] a | b = Tanh (a) y = Atanh (b)",
    "Elu": "f[3,4] a | y = Elu <alpha = 0.7> (a)",
    "Selu": "f[3,4] a | y = Selu (a)",
    "Selu_given": "f[3,4] a | y = Selu <alpha = 2.0, gamma = 3.0> (a)",
    "Celu": "f[3,4] a | y = Celu <alpha = 2.0> (a)",
    "Mish": "f[3,4] a | y = Mish (a)",
    "Softsign": "f[3,4] a | y = Softsign (a)",
    "HardSigmoid": "f[3,4] a | y = HardSigmoid <alpha = 0.9> (a)",
    "HardSwish": "f[3,4] a | n = Constant <value = float {3}> () b = Mul (a, n) y = HardSwish (b)",
    "Shrink": "f[3,4] a | y = Shrink <bias = 0.2> (a)",
    "ThresholdedRelu": "f[3,4] a | y = ThresholdedRelu <alpha = 0.1> (a)",
    "PRelu_one": "f[3,4] a, f[1] b | y = PRelu (a, b)",
    "Resize": "f[1,1,3,4] a | t = Constant <value = float[4] {1, 1, 2, 1.5}> () y = Resize (a, , t)",
    "Resize_sizes": "f[1,2,4,5] a | s = [1,2,7,3] y = Resize (a, , , s)",
    "Resize_linear": 'f[1,1,3,4] a | s = [1,1,5,7] y = Resize <mode = "linear"> (a, , , s)',
    "Resize_align_corners": "f[1,1,6,5] a | t = Constant <value = float[4] {1, 1, 0.6, 0.7}> () "
    'y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (a, , t)',
    "Resize_same_size": "f[1,1,2,3] a | t = Constant <value = float[4] {1, 1, 1, 1.2}> () "
    'y = Resize <mode = "linear"> (a, , t)',
    "Resize_cubic": 'f[1,1,4,5] a | s = [1,1,6,3] y = Resize <mode = "cubic"> (a, , , s)',
    "Resize_axes": 'f[1,1,4,5] a | s = [8] y = Resize <mode = "linear", axes = [-2]> (a, , , s)',
    "Resize_not_larger": "f[1,1,4,6] a | s = [7,8] "
    'y = Resize <axes = [2,3], keep_aspect_ratio_policy = "not_larger"> (a, , , s)',
}
