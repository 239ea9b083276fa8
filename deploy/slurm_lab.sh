#!/usr/bin/env bash
# A real Slurm cluster on one Debian 12 machine: a login host and one slurmd per "host", each in network, PID and
# UTS namespaces of its own, with a /tmp of its own. Needs root; no systemd, no database, no real GPU. Everything it makes
# lies under $LAB, in /etc/netns/$NAME-* and in namespaces $NAME-*; `down` leaves the Debian packages and the user. Another
# NAME and NET make another cluster beside the first.
#
#   slurm_lab.sh install             the packages, once
#   slurm_lab.sh up                  start what does not run yet (safe to repeat), wait until all nodes are idle
#   slurm_lab.sh demo PYTHON         srun and sbatch over two nodes, then torchrun with an all-reduce over Gloo;
#                                    PYTHON: an interpreter with torch that $LAB_USER may run
#   slurm_lab.sh status              sinfo, and the daemons' memory
#   slurm_lab.sh exec CMD...         run CMD on the login host as the lab's user
#   slurm_lab.sh on NODE CMD...      run CMD within a node's namespaces, as root
#   slurm_lab.sh crash NODE          power off: every process of the node is killed at once
#   slurm_lab.sh reboot NODE         crash, start again, and wait until it is idle
#   slurm_lab.sh down                end everything (safe to repeat)
#
# This machine reaches the login host alone, at $NET.1: ssh -i $LAB/ssh/id.$LAB_USER
# -o UserKnownHostsFile=$LAB/ssh/known_hosts. All hosts share $LAB/work/$LAB_USER, a folder of the lab's user. `up` with
# another LAB_USER adds a user, with a key and a folder of its own.
#
# NODES: a word a node, name:GPU type:GPUs:CPUs:link rate ("-" in place of type or rate: none). The type "any" stands for
# GPUs without a type, "a16+v100" for as many of each.
# CGROUP=1 (the default where cgroup v1's freezer can be mounted): steps are tracked by cgroup, as on nearly every real
# cluster, so that nothing outlives its step. CGROUP=0: by parentage, and what daemonises escapes.
#
# ACCOUNTS=1: with slurmdbd on the login host, the account "lab" and its QOS "normal" and "short" (one minute), enforced;
# needs the packages slurmdbd and mariadb-server, which `install` does not bring. FORGET: seconds after which slurmctld
# may forget a job that has ended.
set -euo pipefail

NAME=${NAME:-sl}                   # at most 8 characters
LAB=${LAB:-/run/slurm-$NAME}
NODES=${NODES:-"a2000:a2000:1:1:2500mbit v100:v100:1:1:2500mbit a16:a16:2:2:2500mbit"}
LAB_USER=${LAB_USER:-slurmer}
NET=${NET:-10.77.0}                # a /24 that exists only inside these namespaces
LOGIN=login                        # slurmctld, sshd and the client commands are here
CGROUP=${CGROUP:-$(grep -qE '^freezer[[:space:]]+[1-9]' /proc/cgroups 2>/dev/null && echo 1 || echo 0)}
ACCOUNTS=${ACCOUNTS:-0}
FORGET=${FORGET:-3600}
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'slurm_lab: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
space() { echo "$NAME-$1"; }          # a host's network namespace
field() { cut -d: -f"$1" <<<"$2"; }
names() { local n; for n in $NODES; do field 1 "$n"; done; }

# ------------------------------------------------------------------------------------------------------- packages

install() {
    local package missing=() policy=/usr/sbin/policy-rc.d
    for package in slurmctld slurmd slurm-client munge openssh-server iproute2 procps util-linux; do
        dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    # Their scripts start services of the machine's own: refused, as Docker's images refuse it.
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    apt-get -qq -o DPkg::Lock::Timeout=600 update
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=600 \
        install "${missing[@]}" >/dev/null
}

# -------------------------------------------------------------------------------------------------- configuration

configure() {
    mkdir -p "$LAB"/{etc/slurm,log,state,spool,pid,munge,ssh}
    chmod 711 "$LAB"
    chown slurm: "$LAB"/{state,log,pid}
    chown munge: "$LAB/munge"
    id "$LAB_USER" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$LAB_USER"
    mkdir -p "$LAB/work"
    # Open to others, so that tests see how orch protects its own folders.
    command install -d -m 755 -o "$LAB_USER" -g "$LAB_USER" "$LAB/work/$LAB_USER"
    slurm_conf >"$LAB/etc/slurm/slurm.conf"
    gres_conf >"$LAB/etc/slurm/gres.conf"
    [ "$ACCOUNTS" = 0 ] || accounts_conf
    # v2 would need systemd. Without this file slurmd 22.05 looks for a mounted /sys/fs/cgroup, which `ip netns exec`
    # hides, and ends, even where nothing uses cgroups.
    printf '%s\n' CgroupPlugin=cgroup/v1 "CgroupMountpoint=$LAB/cgroup" >"$LAB/etc/slurm/cgroup.conf"
    hosts >"$LAB/etc/hosts"
    keys
}

keys() {    # the login host's own, and the user's, which logs in there
    local name
    for name in host_key "id.$LAB_USER"; do
        [ -s "$LAB/ssh/$name" ] || ssh-keygen -q -t ed25519 -N '' -C "$name" -f "$LAB/ssh/$name"
    done
    echo "$NET.1 $(cut -d' ' -f1,2 "$LAB/ssh/host_key.pub")" >"$LAB/ssh/known_hosts"
    cp "$LAB/ssh/id.$LAB_USER.pub" "$LAB/ssh/keys.$LAB_USER"
    chmod 644 "$LAB/ssh/keys.$LAB_USER"
    printf '%s\n' "ListenAddress $NET.1" "HostKey $LAB/ssh/host_key" "AuthorizedKeysFile $LAB/ssh/keys.%u" \
        "PidFile none" "UsePAM yes" "UseDNS no" "PasswordAuthentication no" "MaxStartups 100" >"$LAB/ssh/sshd_config"
}

hosts() {
    local name i=11
    echo "127.0.0.1 localhost"
    echo "$NET.1 $LOGIN"
    for name in $(names); do echo "$NET.$((i++)) $name"; done
}

slurm_conf() {
    cat <<CONF
ClusterName=lab
SlurmctldHost=$LOGIN($NET.1)
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/socket
SlurmUser=slurm
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/pid/slurmctld.pid
SlurmdPidFile=$LAB/pid/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
ProctrackType=proctrack/$([ "$CGROUP" = 1 ] && echo cgroup || echo linuxproc)
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
$(accounting)
# What ended is in this file.
JobCompType=jobcomp/filetxt
JobCompLoc=$LAB/log/jobcomp.txt
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# A lab waits for nobody: a heterogeneous job is only looked at by backfill.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2
ReturnToService=2
SlurmdTimeout=20
KillWait=10
MinJobAge=$FORGET
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Nodes are what this file says, whatever this machine has.
SlurmdParameters=config_overrides
CONF
    local n gpu i=11
    for n in $NODES; do
        gpu=$(gres "$n")
        printf 'NodeName=%s NodeHostname=%s NodeAddr=%s.%d CPUs=%d RealMemory=4000 State=UNKNOWN' \
            "$(field 1 "$n")" "$(field 1 "$n")" "$NET" $((i++)) "$(field 4 "$n")"
        [ -z "$gpu" ] && echo || echo " Gres=$gpu Feature=$(field 2 "$n" | tr + ,)"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1"
    echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF"
}

accounting() {
    [ "$ACCOUNTS" = 1 ] || { echo AccountingStorageType=accounting_storage/none; return; }    # so no sacct
    printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd "AccountingStorageHost=$NET.1" "AccountingStoragePass=$LAB/munge/socket" \
        AccountingStorageEnforce=associations,limits,qos
}

accounts_conf() {   # slurmdbd wants it private, and its user's
    printf '%s\n' AuthType=auth/munge "AuthInfo=socket=$LAB/munge/socket" "DbdHost=$LOGIN" SlurmUser=slurm \
        "LogFile=$LAB/log/slurmdbd.log" "PidFile=$LAB/pid/slurmdbd.pid" StorageType=accounting_storage/mysql \
        StorageHost=127.0.0.1 StorageUser=slurm StoragePass=lab >"$LAB/etc/slurm/slurmdbd.conf"
    chown slurm: "$LAB/etc/slurm/slurmdbd.conf"
    chmod 600 "$LAB/etc/slurm/slurmdbd.conf"
}

# Run on the login host, before slurmctld: a database, slurmdbd, and who may run jobs.
accounts_up() {
    local db=$LAB/db
    local -x TMPDIR=$db     # the caller's may be hidden here
    if ! [ -d "$db" ]; then
        command install -d -o mysql -g mysql "$db"
        mariadb-install-db --no-defaults --user=mysql --datadir="$db" --skip-test-db >"$LAB/log/db"
    fi
    mariadbd --no-defaults --user=mysql --datadir="$db" --socket="$db/socket" --bind-address=127.0.0.1 \
        --innodb-use-native-aio=0 --innodb-flush-log-at-trx-commit=0 --log-error="$LAB/log/db" &
    until mariadb-admin --no-defaults --socket="$db/socket" ping >/dev/null 2>&1; do sleep 0.1; done
    mariadb --no-defaults --socket="$db/socket" -e "CREATE USER IF NOT EXISTS slurm@127.0.0.1 IDENTIFIED BY 'lab';
        GRANT ALL ON slurm_acct_db.* TO slurm@127.0.0.1"
    setpriv --reuid slurm --regid slurm --init-groups slurmdbd -D &
    until sacctmgr --noheader list cluster >/dev/null 2>&1; do sleep 0.1; done
    sacctmgr --immediate add cluster lab
    sacctmgr --immediate add qos short set MaxWall=1
    sacctmgr --immediate add account lab Cluster=lab
    sacctmgr --immediate add user "$LAB_USER" Account=lab QOS=normal,short
}

kinds() { local kinds=$(field 2 "$1"); [ "$kinds" = - ] || tr + ' ' <<<"$kinds"; }

gres() {    # gpu:a16:2; gpu:2 without a type
    local kind found=
    for kind in $(kinds "$1"); do found+=,gpu:${kind/#any/}:$(field 3 "$1"); done
    found=${found#,}
    echo "${found//::/:}"
}

gres_conf() {   # slurmd wants a device for each GPU, and takes its number from the name's last digits
    local n name count kind first g
    for n in $NODES; do
        name=$(field 1 "$n") count=$(field 3 "$n") first=0
        mkdir -p "$LAB/dev/$name"
        for kind in $(kinds "$n"); do
            for ((g = first; g < first + count; g++)); do ln -sfn /dev/null "$LAB/dev/$name/nvidia$g"; done
            echo "NodeName=$name Name=gpu $([ "$kind" = any ] || echo "Type=$kind")" \
                "File=$LAB/dev/$name/nvidia[$first-$((first += count, first - 1))]"
        done
    done
}

# --------------------------------------------------------------------------------------------------------- network

network() {
    local n i=11
    [ -d "/sys/class/net/$NAME-br" ] || ip link add "$NAME-br" type bridge
    ip link set "$NAME-br" up
    ip addr replace "$NET.254/24" dev "$NAME-br"
    plug "$LOGIN" 1 -
    for n in $NODES; do plug "$(field 1 "$n")" $((i++)) "$(field 5 "$n")"; done
}

plug() {    # name, last octet, rate
    local ns port=$NAME-p$2 mine
    ns=$(space "$1")
    mine=/etc/netns/$ns             # `ip netns exec` lays what is here over /etc
    if ! [ -e "/run/netns/$ns" ]; then
        ip netns add "$ns"
        ip link add "$port" type veth peer name eth0 netns "$ns"
        ip link set "$port" master "$NAME-br" up
        ip -n "$ns" link set lo up
        ip -n "$ns" addr add "$NET.$2/24" dev eth0
        ip -n "$ns" link set eth0 up
    fi
    if [ "$3" != - ]; then
        ip netns exec "$ns" tc qdisc replace dev eth0 root tbf rate "$3" burst 256kb latency 20ms
        tc qdisc replace dev "$port" root tbf rate "$3" burst 256kb latency 20ms
    fi
    mkdir -p /etc/slurm "$mine/slurm"
    cp -p "$LAB"/etc/slurm/* "$mine/slurm/"
    cp "$LAB/etc/hosts" "$mine/hosts"
}

# ------------------------------------------------------------------------------------------------------- processes

boot() {    # name, script of its first process: a "host", whose death ends every process on it
    running "$1" && return
    # setsid: a Ctrl-C for `up`, or the end of its terminal, is not theirs.
    setsid ip netns exec "$(space "$1")" unshare --uts --pid --mount --fork --kill-child --mount-proc \
        bash -c "hostname $1; mount -t tmpfs -o mode=1777 none /tmp; $2" </dev/null >>"$LAB/log/$1.console" 2>&1 &
    echo $! >"$LAB/pid/$1.host"
    disown
}

boot_node() {
    local mounted=:
    # In a group of this lab, which a namespace shows as the whole: another lab may have a host of the same name.
    [ "$CGROUP" = 0 ] || mounted="mkdir -p $LAB/cgroup/freezer; mount -t cgroup -o freezer none $LAB/cgroup/freezer; \
        mkdir -p $LAB/cgroup/freezer/$NAME; echo \$\$ >$LAB/cgroup/freezer/$NAME/cgroup.procs; umount $LAB/cgroup/freezer"
    local groups="mount -t cgroup -o freezer none $LAB/cgroup/freezer;"
    [ "$CGROUP" = 0 ] && groups=
    boot "$1" "$mounted; mkdir -p $LAB/spool/$1; \
        exec unshare --cgroup bash -c '$groups while :; do slurmd -D -N $1; sleep 1; done'"
}

boot_login() {
    local accounts=:
    [ "$ACCOUNTS" = 0 ] || accounts="$(declare -f accounts_up); LAB=$LAB LAB_USER=$LAB_USER accounts_up"
    boot "$LOGIN" "/usr/sbin/sshd -f $LAB/ssh/sshd_config; $accounts; while :; do slurmctld -D; sleep 1; done"
}

running() { [ -s "$LAB/pid/$1.host" ] && kill -0 "$(cat "$LAB/pid/$1.host")" 2>/dev/null; }
first() { pgrep -P "$(cat "$LAB/pid/$1.host")" | head -1; }     # the host's PID 1, as seen from outside

enter() {   # name, user, command...
    local name=$1 user=$2 pid
    shift 2
    running "$name" || die "$name is not running"
    pid=$(first "$name")
    exec nsenter --target "$pid" --net --uts --pid --mount --wd=/ -- \
        setpriv --reuid "$user" --regid "$user" --init-groups \
        env HOME="$(getent passwd "$user" | cut -d: -f6)" USER="$user" LOGNAME="$user" "$@"
}

munge_up() {
    if ! [ -s "$LAB/munge/pid" ] || ! kill -0 "$(cat "$LAB/munge/pid")" 2>/dev/null; then
        rm -f "$LAB"/munge/*
        # One for all: its socket is a file, and all hosts here see the same files. The package made the key.
        setpriv --reuid munge --regid munge --init-groups setsid munged --socket="$LAB/munge/socket" \
            --pid-file="$LAB/munge/pid" --log-file="$LAB/munge/log" --seed-file="$LAB/munge/seed"
    fi
}

await() {   # until Slurm would start a job there; by the clock, since sinfo waits by itself for a controller
    local state= end=$((SECONDS + 120)) log
    while [ $SECONDS -lt $end ]; do
        state=$( (enter "$LOGIN" root sinfo -h -p main -n "$1" -o %T) 2>/dev/null) || true
        case $state in idle | planned | mixed | allocated) return ;; esac
        sleep 0.1
    done
    for log in "$LAB"/log/*; do
        say "the end of $log:"
        tail -n 12 "$log" >&2
    done
    die "$1 is '$state' after 120 s"
}

up() {
    local name began=$SECONDS
    [ "$(id -u)" = 0 ] || die "needs root"
    for name in slurmctld slurmd sinfo munged sshd ip tc; do
        command -v $name >/dev/null || die "$name is missing: $0 install"
    done
    configure
    network
    munge_up
    mkdir -p /run/sshd
    boot_login
    for name in $(names); do boot_node "$name"; done
    for name in $(names); do await "$name"; done
    say "$(names | wc -w) nodes idle after $((SECONDS - began)) s"
}

crash() {
    local i
    running "$1" || return 0
    kill -9 "$(first "$1")" 2>/dev/null || true
    for ((i = 0; i < 200; i++)); do running "$1" || { rm -f "$LAB/pid/$1.host"; return 0; }; sleep 0.05; done
    die "$1 does not end"
}

down() {
    local name i hosts
    hosts=$(ip netns list | sed -n "s/^$NAME-\([^ ]*\).*/\1/p")   # whatever NODES said at `up`
    for name in $hosts; do crash "$name"; done
    if [ -s "$LAB/munge/pid" ]; then
        kill "$(cat "$LAB/munge/pid")" 2>/dev/null || true
        for ((i = 0; i < 100; i++)); do kill -0 "$(cat "$LAB/munge/pid" 2>/dev/null)" 2>/dev/null || break; sleep 0.05; done
    fi
    for name in $hosts; do
        ip netns del "$(space "$name")" 2>/dev/null || true
        rm -rf "/etc/netns/$(space "$name")"
    done
    # What a crashed slurmd left; only empty groups can be removed.
    find "/sys/fs/cgroup/freezer/$NAME" -depth -type d -exec rmdir {} + 2>/dev/null || true
    ip link del "$NAME-br" 2>/dev/null || true
    rm -rf "$LAB"
}

status() {
    local name pid total=0 kib
    (enter "$LOGIN" root sinfo -p main -N -o '%N %T %G %f %E')
    for name in "$LOGIN" $(names); do
        running "$name" || continue
        pid=$(first "$name")
        kib=$(ps -o rss= --pid "$pid" --ppid "$pid" | awk '{s += $1} END {print s}')
        printf '%-8s %6d KiB\n' "$name" "$kib"
        total=$((total + kib))
    done
    kib=$(ps -o rss= -p "$(cat "$LAB/munge/pid")")
    printf '%-8s %6d KiB\nall      %6d KiB\n' munged "$kib" $((total + kib))
}

# ------------------------------------------------------------------------------------------------------------ demo

demo() {
    local python=${1:?an interpreter with torch} work job
    work=$(mktemp -d)
    chown "$LAB_USER" "$work"
    cat >"$work/all_reduce.py" <<'PY'
import os, socket
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print(socket.gethostname(), "rank", dist.get_rank(), "of", dist.get_world_size(), "node rank", os.environ["GROUP_RANK"],
      "master", os.environ["MASTER_ADDR"], "GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), "sum", value.item(), flush=True)
dist.destroy_process_group()
PY
    cat >"$work/job.sh" <<SH
#!/bin/bash
# One a16 and one v100, on purpose. SLURM_NODEID counts Slurm's own sorted list, whose first host is the master here.
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:1 --constraint=[a16*1&v100*1]
export MASTER=\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -1) PORT=\$((20000 + SLURM_JOB_ID % 10000))
export GLOO_SOCKET_IFNAME=eth0
srun --kill-on-bad-exit=1 --label bash -c '
    exec $python -m torch.distributed.run --nnodes=\$SLURM_NNODES --node-rank=\$SLURM_NODEID --nproc-per-node=1 \
        --master-addr=\$MASTER --master-port=\$PORT $work/all_reduce.py'
SH
    say "srun, two tasks on two nodes:"
    (enter "$LOGIN" "$LAB_USER" srun --nodes=2 --gres=gpu:1 --constraint='[a16*1&v100*1]' --label \
        bash -c 'echo $(hostname) task $SLURM_PROCID of $SLURM_NTASKS GPU $CUDA_VISIBLE_DEVICES')
    say "sbatch, torchrun by srun:"
    job=$( (enter "$LOGIN" "$LAB_USER" sbatch --wait --parsable --output="$work/out" "$work/job.sh") ) || true
    grep ' rank ' "$work/out" || { cat "$work/out" >&2; die "job $job said nothing"; }
    [ "$(grep -c 'of 2 .* sum 3.0' "$work/out")" = 2 ] || die "the sum is wrong"
    (enter "$LOGIN" "$LAB_USER" scontrol show job -o "$job") | grep -oE '(JobState|RunTime|NodeList)=[^ ]+' | grep -v '(null)'
    rm -rf "$work"
}

case ${1:-} in
    install | up | down | status) "$1" ;;
    demo) demo "${2:-}" ;;
    exec) shift; enter "$LOGIN" "$LAB_USER" "$@" ;;
    on) name=$2; shift 2; enter "$name" root "$@" ;;
    crash) crash "$2" ;;
    reboot) crash "$2"; boot_node "$2"; await "$2" ;;
    *) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2 ;;
esac
