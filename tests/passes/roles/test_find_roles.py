from partc.passes.graph.training_graph import Gradient
from partc.passes.roles.find_gradients import find_gradients
from partc.passes.roles.find_roles import Roles, VariableRole, find_roles
from tests.builders.graphs.foreign_steps import ADAM, CLIPPED, TABLE, import_step

# The sums of a table's rows feed its accumulator and the norm of all gradients.
SPARSE_CLIPPED = """
step (int64[6] ids, float[6,4] rows0, float[4,4] W, float[10,4] E, float[10,4] acc)
    => (float[4,4] W_next, float[10,4] E_next, float[10,4] acc_next, float loss)
<float one = {1.0}, int64[2] size = {10, 4}, int64[1] last = {-1}> {
    e = Gather (E, ids)
    rows = Mul (e, rows0)
    h = MatMul (rows, W)
    loss = ReduceMean <keepdims = 0> (h)
    rt = Transpose <perm = [1, 0]> (rows)
    dW = MatMul (rt, h)
    zeros = ConstantOfShape (size)
    positions = Unsqueeze (ids, last)
    sums = ScatterND <reduction = "add"> (zeros, positions, rows)
    s2 = Mul (sums, sums)
    E2 = ReduceSum <keepdims = 0> (s2)
    W2 = ReduceSumSquare <keepdims = 0> (dW)
    total = Add (E2, W2)
    scale = Div (one, total)
    gE = Mul (sums, scale)
    gW = Mul (dW, scale)
    W_next = Sub (W, gW)
    squared = Mul (gE, gE)
    acc_next = Add (acc, squared)
    E_next = Sub (E, gE)
}
"""


def roles_of(text: str) -> tuple[Roles, dict[str, str]]:
    """Return the roles, and the name of the node that makes each tensor."""
    training = import_step(text)
    find_gradients(training)
    makers = {node.outputs[0].name: node.name for node in training.graph.nodes}
    return find_roles(training), makers


def test_slots_belong_to_the_parameter_that_they_are_updated_with() -> None:
    roles, _ = roles_of(ADAM)

    assert roles.variables == {
        "W": VariableRole("parameter"),
        "m": VariableRole("slot", "W"),
        "v": VariableRole("slot", "W"),
        "count": VariableRole("other"),
    }


def test_a_slot_of_summed_rows_belongs_to_its_table_although_the_clip_reads_them_too() -> None:
    training = import_step(SPARSE_CLIPPED)
    training.gradients = {
        "E": Gradient("E", ids="ids", rows="rows"),
        "W": Gradient("W", dense="dW"),
    }

    assert find_roles(training).variables["acc"] == VariableRole("slot", "E")


def test_moving_averages_and_states_are_other_variables() -> None:
    roles, _ = roles_of(CLIPPED)

    assert {name for name, role in roles.variables.items() if role.role == "other"} == {"mean", "state"}


def test_clipping_is_post_aggregation_between_main_computation_and_updates() -> None:
    roles, makers = roles_of(CLIPPED)

    assert {makers[t] for t in ("dW", "db", "loss", "state_next", "mean_next")} <= roles.main
    assert roles.post_aggregation == {makers[t] for t in ("dW2", "db2", "total", "norm", "larger", "shrink")}
    assert roles.updates == {makers[t] for t in ("cW", "cb", "sW", "sb", "W_next", "bias_next")}


def test_every_node_has_exactly_one_role() -> None:
    for text in (ADAM, CLIPPED, TABLE):
        roles, makers = roles_of(text)
        parts = (roles.main, roles.post_aggregation, roles.updates)
        assert sum(map(len, parts)) == len(makers) == len(frozenset().union(*parts))


def test_ids_that_are_data_do_not_draw_the_forward_pass_behind_the_gradient() -> None:
    roles, makers = roles_of(TABLE)

    assert {makers[t] for t in ("e1", "d", "loss", "E/ids_1", "E/rows_1")} <= roles.main
    assert {makers[t] for t in ("dE", "part", "E_next")} <= roles.updates
