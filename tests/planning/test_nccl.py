"""The NCCL settings of hosts that are not alike, and when such hosts are refused: plans of made-up hosts."""

import pytest

from orchestrator.cli.clusters import show_up
from orchestrator.clusters import Up, unlike
from orchestrator.errors import UnlikeError
from orchestrator.forecast import inputs_of
from orchestrator.hosts import Cluster, Problem, RdmaPort, checks
from orchestrator.planning import GpuHost, RunRequest, request_of, unlike_versions
from orchestrator.views import dry_run, outlook_of
from tests.support.plans import RESNET, SCRIPT, by_hand, host, node, pair, plan
from tests.support.probed_hosts import facts as facts_of
from tests.support.probed_hosts import torch as torch_of

ROCE, INFINIBAND = RdmaPort(device="mlx5_0", link_layer="Ethernet"), RdmaPort(device="mlx5_1", link_layer="InfiniBand")
CHOICES = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NET_OVERHEAD": "1000"}
SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}


def gpu_host(number, nccl="2.27.5", vendor="GenuineIntel", rdma=(), *, verbs=True, torch="2.10.0+cu128", **changes):
    found = torch_of(version=torch, nccl=nccl, verbs=verbs)
    return host(number, torch=found, cpu_vendor=vendor, rdma=rdma, interface="eno1", **changes)


def variables(first, second, request=RESNET, **node_keys):
    """The variables of NCCL on each of two hosts; `bandwidth_bps` unknown unless given."""
    made = plan([node(41, **node_keys), node(42, **node_keys)], {"n41": first, "n42": second}, request)
    names = ("NCCL_", "TORCH_")
    mine = [
        {name: value for name, value in one.env.items() if name.startswith(names) and not name.endswith("IFNAME")}
        for one in made.nodes
    ]
    return made, mine


def test_alike_hosts_get_no_setting_but_to_say_what_goes_wrong():
    made, environments = variables(gpu_host(41), gpu_host(42))
    assert environments == [{"NCCL_DEBUG": "WARN"}] * 2
    assert [(setting.name, setting.value) for setting in made.nccl] == [("NCCL_DEBUG", "WARN")]
    assert made.backend == "nccl"


def test_hosts_without_gpus_hear_nothing_of_nccl():
    for first, second in ((host(41, gpus=0), host(42, gpus=0)), (gpu_host(41), host(42, gpus=0))):
        made, environments = variables(first, second)
        assert environments == [{}, {}]
        assert (made.nccl, made.backend) == ((), "gloo")
    made, environments = variables(gpu_host(41), gpu_host(42), by_hand(backend="gloo"))
    assert (environments, made.backend) == ([{}, {}], "gloo")


@pytest.mark.parametrize(
    ("nccl", "vendors", "expected"),
    [
        ("2.17.1", ("GenuineIntel", "AuthenticAMD"), {}),
        ("2.18.1", ("GenuineIntel", "AuthenticAMD"), CHOICES),
        ("2.21.5", ("GenuineIntel", "AuthenticAMD"), CHOICES),
        ("2.22.3", ("GenuineIntel", "AuthenticAMD"), {}),
        ("2.19.3", ("AuthenticAMD", "AuthenticAMD"), {}),
        ("2.19.3", ("GenuineIntel", None), {}),
    ],
)
def test_cpus_of_two_makers_get_one_algorithm_where_nccl_goes_by_them(nccl, vendors, expected):
    made, environments = variables(gpu_host(41, nccl, vendors[0]), gpu_host(42, nccl, vendors[1]))
    assert environments == [{"NCCL_DEBUG": "WARN", **expected}] * 2
    reasons = {setting.reason for setting in made.nccl if setting.name in CHOICES}
    assert all("AMD and Intel" in reason and nccl in reason for reason in reasons)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"rdma": (ROCE,)}, {"rdma": ()}, "no InfiniBand or RoCE on n42"),
        ({"rdma": (ROCE,)}, {"rdma": (ROCE,), "verbs": False}, "no InfiniBand or RoCE on n42"),
        ({"rdma": (ROCE,)}, {"rdma": (INFINIBAND,)}, "InfiniBand on some hosts and RoCE on others"),
        ({"rdma": (ROCE,)}, {"rdma": (ROCE, INFINIBAND)}, None),
        ({"rdma": (INFINIBAND,)}, {"rdma": (INFINIBAND,)}, None),
        ({"rdma": ()}, {"rdma": ()}, None),
        ({"rdma": (ROCE,)}, {"rdma": None}, None),
    ],
)
def test_infiniband_is_left_alone_only_where_every_host_has_it(first, second, reason):
    made, environments = variables(gpu_host(41, **first), gpu_host(42, **second))
    assert [one.get("NCCL_IB_DISABLE") for one in environments] == ["1" if reason else None] * 2
    assert [setting.reason for setting in made.nccl if setting.name == "NCCL_IB_DISABLE"] == (
        [reason] if reason else []
    )


def test_a_host_alone_needs_no_word_about_other_hosts():
    alone = plan([node(41)], {"n41": gpu_host(41, "2.19.3", rdma=(ROCE,), peers=())}, RESNET)
    assert [setting.name for setting in alone.nccl] == ["NCCL_DEBUG"]


@pytest.mark.parametrize(
    ("bandwidth_bps", "rdma", "expected"),
    [
        (2.5e9, (), {"NCCL_MAX_NCHANNELS": "2"}),
        (16e9, (), {}),
        (25e9, (), SOCKETS),
        (25e9, (ROCE,), {}),
        (2.5e9, (ROCE,), {}),  # of a network that nothing goes over
        (2.5e9, None, {}),
    ],
)
def test_channels_and_sockets_fit_the_slowest_link(bandwidth_bps, rdma, expected):
    _, environments = variables(gpu_host(41, rdma=rdma), gpu_host(42, rdma=rdma), bandwidth_bps=bandwidth_bps)
    assert environments == [{"NCCL_DEBUG": "WARN", **expected}] * 2


@pytest.mark.parametrize(("nccl", "gpus", "expected"), [("2.31.2", 3, "0"), ("2.31.2", 1, None), ("2.30.7", 3, None)])
def test_unequal_numbers_of_gpus_do_without_nvls_where_it_would_hang(nccl, gpus, expected):
    _, environments = variables(gpu_host(41, nccl, gpus=gpus), gpu_host(42, nccl))
    assert [one.get("NCCL_NVLS_ENABLE") for one in environments] == [expected] * 2


@pytest.mark.parametrize(
    ("torch", "request_", "expected"),
    [("2.15.0+cu132", SCRIPT, "0"), ("2.14.1+cu132", SCRIPT, None), ("2.15.0+cu132", RESNET, None)],
)
def test_a_persons_own_script_gets_the_back_end_that_overlaps(torch, request_, expected):
    _, environments = variables(gpu_host(41, torch=torch), gpu_host(42, torch=torch), request_)
    assert [one.get("TORCH_DIST_USE_NCCL2") for one in environments] == [expected] * 2


@pytest.mark.parametrize(
    ("own", "ours", "stays"),
    [
        ({"NCCL_IB_DISABLE": "0"}, "NCCL_IB_DISABLE", ["0", None]),
        ({"NCCL_IB_HCA": "mlx5_0"}, "NCCL_IB_DISABLE", [None, None]),
        ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG", ["INFO", None]),
        ({"NCCL_MIN_NCHANNELS": "8"}, "NCCL_MAX_NCHANNELS", [None, None]),
        ({"NCCL_ALGO": "Tree"}, "NCCL_ALGO", ["Tree", None]),
    ],
)
def test_what_a_person_sets_is_theirs(own, ours, stays):
    unlike = {"n41": gpu_host(41, "2.19.3", rdma=(ROCE,)), "n42": gpu_host(42, "2.19.3", "AuthenticAMD")}
    nodes = [node(41, env=own, bandwidth_bps=2.5e9), node(42, bandwidth_bps=2.5e9)]
    made = plan(nodes, unlike, RESNET, master="n41")
    assert [one.env.get(ours) for one in made.nodes] == stays
    assert ours not in {setting.name for setting in made.nccl}
    for_this_job = RunRequest("script", "train.py", ("train.py",), env=own)
    made = plan([node(41, bandwidth_bps=2.5e9), node(42, bandwidth_bps=2.5e9)], unlike, for_this_job)
    assert [one.env.get(ours) for one in made.nodes] == [stays[0]] * 2


def test_a_dry_run_shows_each_setting_with_its_reason(capsys):
    made, _ = variables(gpu_host(41, rdma=(ROCE,)), gpu_host(42))
    dry_run.print_plan(made)
    shown = capsys.readouterr().out.splitlines()
    assert "sets NCCL_IB_DISABLE=1: no InfiniBand or RoCE on n42" in shown
    assert "sets NCCL_DEBUG=WARN: so that NCCL reports errors" in shown


def test_orch_plan_shows_them_too_and_counts_on_nccl():
    request = request_of("resnet152_cifar", {})
    made, _ = variables(gpu_host(41, rdma=(ROCE,)), gpu_host(42), request, bandwidth_bps=2.5e9)
    view = inputs_of(made, {})
    assert view.scene.wire.costs.name == "nccl"
    assert "sets NCCL_IB_DISABLE=1: no InfiniBand or RoCE on n42" in outlook_of(made, view, frozenset()).basis
    without = {"n41": gpu_host(41), "n42": host(42, torch=torch_of(nccl_available=False))}
    nodes = [node(number, bandwidth_bps=2.5e9) for number in (41, 42)]
    assert inputs_of(plan(nodes, without, request), {}).scene.wire.costs.name == "gloo"


# ---- unlike hosts ---------------------------------------------------------------------------------------------


def test_unequal_nccl_is_refused_naming_hosts_versions_and_a_way_out():
    nodes = [node(41), node(42), node(43)]
    new = {f"n{number}": gpu_host(number, "2.30.7", torch="2.14.1+cu132", peers=(41, 42, 43)) for number in (41, 42)}
    found = {**new, "n43": gpu_host(43, "2.29.3", torch="2.14.1+cu126", peers=(41, 42, 43))}
    with pytest.raises(UnlikeError) as refused:
        plan(nodes, found, RESNET)
    assert "2.30.7 on n41, n42; 2.29.3 on n43" in refused.value.message
    assert "`orch setup --torch 2.10.0`" in refused.value.remedy  # the V100s run nothing newer
    assert "`--nodes n41,n42`" in refused.value.remedy
    (note,) = plan(nodes, found, SCRIPT).notes  # it may use Gloo alone
    assert refused.value.message in note and refused.value.remedy in note
    assert "A script that uses NCCL would hang or fail, a script that uses Gloo runs" in note
    assert plan(nodes[:2], new, RESNET).backend == "nccl"


def test_up_names_usable_hosts_that_cannot_train_together():
    facts = {"n41": gpu_host(41, "2.30.7"), "n42": gpu_host(42, "2.29.3"), "n43": host(43, gpus=0)}
    nodes = tuple(node(number) for number in (41, 42, 43))
    cluster = Cluster(name="c", file="c.yaml", nodes=nodes, facts=facts)
    assert "2.30.7 on n41; 2.29.3 on n42" in unlike(cluster).message
    assert unlike(cluster.model_copy(update={"released": ("n42",)})) is None
    assert unlike(cluster.model_copy(update={"problems": {"n42": Problem(message="is off")}})) is None


def test_up_ends_with_exit_code_3_where_hosts_differ(capsys):
    facts = {"n41": gpu_host(41, "2.30.7"), "n42": gpu_host(42, "2.29.3")}
    cluster = Cluster(name="c", file="c.yaml", nodes=(node(41), node(42)), facts=facts)
    with pytest.raises(SystemExit) as left:
        show_up(Up(cluster, None, {}, (), unlike(cluster)), as_json=False)
    said = capsys.readouterr()
    assert left.value.code == 3
    assert "error: NCCL must be the same on all hosts" in said.err and "try: give all of them one torch" in said.err


def test_a_release_that_is_there_in_two_builds_is_no_remedy():
    hosts = [GpuHost(node(41), gpu_host(41, "2.27.5")), GpuHost(node(42), gpu_host(42, "2.27.3"))]
    assert "setup --torch 2.9.1" in unlike_versions(hosts).remedy


def test_hosts_whose_gradients_go_by_gloo_may_have_any_nccl():
    found = {"n41": gpu_host(41, "2.30.7"), "n42": gpu_host(42, "2.29.3")}
    by_gloo = by_hand(backend="gloo")
    assert plan([node(41), node(42)], found, by_gloo).backend == "gloo"
    assert plan([node(41, device="cpu"), node(42)], found, RESNET).backend == "gloo"


def test_where_a_torch_lacks_nccl_the_plan_says_gloo_and_why():
    nodes, found = pair(host(41, torch=torch_of(nccl_available=False)))
    made = plan(nodes, found, RESNET)
    assert made.backend == "gloo"
    assert all("--backend=gloo" in one.command for one in made.nodes)
    assert made.notes == ("torch on n41 has no NCCL: Gloo carries the gradients everywhere",)
    forced = by_hand(backend="nccl")
    assert (plan(nodes, found, forced).backend, plan(nodes, found, forced).notes) == ("nccl", ())


# ---- all GPUs of a host in one process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "gpus"),
    [({}, (0, 1, 2)), ({"ranks": 1}, (0, 1, 2)), ({"gpus": 2, "ranks": 1}, (0, 1))],
)
def test_dp_is_one_rank_that_sees_and_has_every_gpu_of_its_host(keys, gpus):
    dp = by_hand(strategy="dp", batch="8")
    (one,) = plan([node(41, **keys)], {"n41": host(41, gpus=3, peers=())}, dp).nodes
    assert (one.ranks, one.shares) == (1, (8,))
    assert one.gpu_uuids == tuple(f"GPU-41-{number}" for number in gpus)
    assert one.env["CUDA_VISIBLE_DEVICES"] == ",".join(one.gpu_uuids)


def test_the_gpus_a_torch_has_no_code_for_come_with_the_release_that_has():
    old = torch_of(version="2.15.0+cu132", cuda="13.2", arch_list=("sm_75", "sm_120"))
    error = checks.unusable(node(42), facts_of(torch=old))
    assert "no code for its Tesla V100-PCIE-16GB (sm_70" in error.message
    assert "`orch setup --torch 2.10.0`" in error.remedy and "PIP_INDEX_URL" in error.remedy


def test_a_torch_too_new_for_the_driver_comes_with_the_release_that_is_not():
    new = torch_of(version="2.15.0+cu132", cuda="13.2", devices=0, arch_list=("sm_70",), cuda_error="driver too old")
    error = checks.unusable(node(42), facts_of(torch=new))
    assert "cannot use the GPUs (driver too old)" in error.message
    assert "update the driver" in error.remedy and "`orch setup --torch 2.10.0`" in error.remedy
