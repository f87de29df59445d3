{{- define "outrider.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "outrider.labels" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What selects the pods of a pool: (dict "root" $ "pool" "target") */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .pool }}
{{- end -}}

{{/* The same where pods that lend their GPUs to targets count as well, as a selector. (dict "root" $) */}}
{{- define "outrider.groupSelector" -}}
matchLabels:
  app.kubernetes.io/name: outrider
  app.kubernetes.io/instance: {{ .root.Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [target, target-node]}
{{- end -}}

{{- define "outrider.image" -}}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{ printf "%s:%s-%s" .root.Values.image.repository $tag .suffix }}{{ with get .root.Values.image.digests .suffix }}@{{ . }}{{ end }}
{{- end -}}

{{- define "outrider.drainSeconds" -}}
{{- $section := index .root.Values.config .pool | default dict -}}
{{ $section.drain_seconds | default 30 }}
{{- end -}}

{{/* Pods that share a target: more than one need vLLM, and GPUs in equal shares. */}}
{{- define "outrider.nodesPerReplica" -}}
{{- $nodes := int .Values.target.nodesPerReplica -}}
{{- if gt $nodes 1 -}}
{{- $target := .Values.config.target | default dict -}}
{{- $size := int (dig "tensor_parallel_size" 1 $target) -}}
{{- $executor := dig "engine_args" "distributed_executor_backend" "ray" $target -}}
{{- if eq .Values.mode "ray" -}}
{{- fail (printf "target.nodesPerReplica %d: in mode ray a target has all its GPUs on one node; set it to 1" $nodes) -}}
{{- end -}}
{{- if ne (toString $target.engine) "vllm" -}}
{{- fail (printf "target.nodesPerReplica %d: only config.target.engine vllm spans nodes, not %s" $nodes ($target.engine | default "torch")) -}}
{{- end -}}
{{- if ne (mod $size $nodes) 0 -}}
{{- fail (printf "target.nodesPerReplica %d: config.target.tensor_parallel_size %d cannot be divided by it" $nodes $size) -}}
{{- end -}}
{{- if lt (mul $nodes (int .Values.target.gpus)) $size -}}
{{- fail (printf "target.gpus %d: config.target.tensor_parallel_size %d over %d nodes needs %d of each" (int .Values.target.gpus) $size $nodes (div $size $nodes)) -}}
{{- end -}}
{{- if not .Values.target.rayTokenSecret -}}
{{- fail (printf "target.nodesPerReplica %d: without a token everyone who reaches its Ray can run programs there; name a secret with the key token in target.rayTokenSecret" $nodes) -}}
{{- end -}}
{{- if ne $executor "ray" -}}
{{- fail (printf "target.nodesPerReplica %d: config.target.engine_args.distributed_executor_backend is ray then, not %s" $nodes $executor) -}}
{{- end -}}
{{- end -}}
{{ $nodes }}
{{- end -}}

{{/* Where draft workers are: a pool, a sidecar of each target, or nothing when there are none: targets may draft themselves. */}}
{{- define "outrider.drafts" -}}
{{- $draft := .Values.config.draft | default dict -}}
{{- $speculation := .Values.config.speculation | default dict -}}
{{- $replicas := int (dig "replicas" 1 $draft) -}}
{{- $placement := $draft.placement | default "pool" | replace "auto" "pool" -}}
{{- if and (ne (toString $draft.drafter) "engine") (ne $placement "in-process") (ne $replicas 0) (ne (int (dig "num_speculative_tokens" 4 $speculation)) 0) -}}
{{- if and (has $placement (list "sidecar" "host-cpu")) (ne $replicas 1) -}}
{{- fail (printf "config.draft.replicas %d: in a pod there is one sidecar, set it to 1" $replicas) -}}
{{- end -}}
{{- if and (eq $placement "host-cpu") (ne (int .Values.draft.gpus) 0) -}}
{{- fail (printf "draft.gpus %d: with config.draft.placement host-cpu the draft computes on the CPU, set it to 0" (int .Values.draft.gpus)) -}}
{{- end -}}
{{ eq $placement "host-cpu" | ternary "sidecar" $placement }}
{{- end -}}
{{- end -}}

{{/* The compute threads of a host-cpu draft: one for each core that its container requests. By default it would start one for each core of the node. */}}
{{- define "outrider.hostCpuThreads" -}}
{{- $draft := .Values.config.draft | default dict -}}
{{- $cores := dig "requests" "cpu" "" .Values.draft.resources | toString -}}
{{- if $draft.threads -}}
{{ $draft.threads }}
{{- else if regexMatch "^[1-9][0-9]*$" $cores -}}
{{ $cores }}
{{- else -}}
{{- fail (printf "draft.resources.requests.cpu %q: with config.draft.placement host-cpu give a whole number of cores, such as 16" $cores) -}}
{{- end -}}
{{- end -}}

{{/* The tree that all programs read: what is configured, and where they listen and find each other. */}}
{{- define "outrider.config" -}}
{{- $name := include "outrider.name" . -}}
{{- $config := deepCopy .Values.config -}}
{{- $router := dict "host" "0.0.0.0" "port" 8000 "admin_listen" (dig "router" "admin_listen" "127.0.0.1:8001" .Values.config) -}}
{{- $target := dict "addresses" (list (printf "dns:%s-target:7000" $name)) "listen" "0.0.0.0:7000" "metrics_host" "0.0.0.0" "metrics_port" 9100 -}}
{{- if gt (include "outrider.nodesPerReplica" . | int) 1 -}}
{{- $_ := set $target "engine_args" (dict "distributed_executor_backend" "ray") -}}
{{- end -}}
{{- $addresses := dict "pool" (list (printf "dns:%s-draft:7001" $name)) "sidecar" (list "127.0.0.1:7001") -}}
{{- $where := include "outrider.drafts" . -}}
{{- $listen := eq $where "sidecar" | ternary "127.0.0.1:7001" "0.0.0.0:7001" -}}
{{- $draft := dict "addresses" (get $addresses $where | default list) "listen" $listen "metrics_host" "0.0.0.0" "metrics_port" 9101 -}}
{{- if and (eq $where "sidecar") (eq (dig "draft" "placement" "" .Values.config) "host-cpu") -}}
{{- $_ := set $draft "threads" (include "outrider.hostCpuThreads" . | int) -}}
{{- end -}}
{{- if .Values.tls.secretName -}}
{{- /* Kubernetes' probes have neither certificate nor token. */ -}}
{{- $_ := set $target "health_listen" "0.0.0.0:7100" -}}
{{- if ne $where "sidecar" -}}{{- $_ := set $draft "health_listen" "0.0.0.0:7101" -}}{{- end -}}
{{- end -}}
{{- $programs := dict "router" $router "target" $target "draft" $draft -}}
{{- toYaml (mergeOverwrite $config $programs (include "outrider.security" . | fromYaml)) -}}
{{- end -}}

{{/* Settings with files of secrets; programs read them again when they change. */}}
{{- define "outrider.security" -}}
{{- $router := dict -}}
{{- $worker := dict -}}
{{- $tls := dict -}}
{{- $folder := "/etc/outrider-secrets" -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $tls "ca_file" (printf "%s/tls/ca.crt" $folder) -}}
{{- $_ := set $tls "certificate_file" (printf "%s/tls/tls.crt" $folder) -}}
{{- $_ := set $tls "key_file" (printf "%s/tls/tls.key" $folder) -}}
{{- $_ := set $worker "tls_server_name" (required "tls.serverName: give the name that the certificates in tls.secretName are for" .Values.tls.serverName) -}}
{{- end -}}
{{- if .Values.tls.tokenSecret -}}
{{- if not .Values.tls.secretName -}}
{{- fail (printf "tls.tokenSecret %s: a token needs certificates, set tls.secretName" .Values.tls.tokenSecret) -}}
{{- end -}}
{{- $_ := set $tls "token_file" (printf "%s/token/token" $folder) -}}
{{- end -}}
{{- if not (or .Values.router.apiKeysSecret .Values.router.open) -}}
{{- fail "router.apiKeysSecret is empty: everyone who reaches a router could use it; name a secret with the key keys (docs/SECURITY.md), or set router.open to true" -}}
{{- end -}}
{{- if .Values.router.apiKeysSecret -}}{{- $_ := set $router "api_keys_file" (printf "%s/api-keys/keys" $folder) -}}{{- end -}}
{{- if .Values.router.adminKeysSecret -}}{{- $_ := set $router "admin_keys_file" (printf "%s/admin-keys/keys" $folder) -}}{{- end -}}
{{- if .Values.router.tlsSecret -}}
{{- $_ := set $router "tls_certificate_file" (printf "%s/https/tls.crt" $folder) -}}
{{- $_ := set $router "tls_key_file" (printf "%s/https/tls.key" $folder) -}}
{{- end -}}
{{- if .Values.metricsTokenSecret -}}
{{- range list $router $worker -}}{{- $_ := set . "metrics_token_file" (printf "%s/metrics-token/token" $folder) -}}{{- end -}}
{{- end -}}
{{- $tree := dict -}}
{{- if $router -}}{{- $_ := set $tree "router" $router -}}{{- end -}}
{{- if $worker -}}{{- $_ := set $tree "target" $worker -}}{{- $_ := set $tree "draft" (deepCopy $worker) -}}{{- end -}}
{{- if $tls -}}{{- $_ := set $tree "tls" $tls -}}{{- end -}}
{{- toYaml $tree -}}
{{- end -}}

{{/* The secrets that a pool's pods have, by the folder that they are in: keys of clients are for routers alone, "ray" has all. */}}
{{- define "outrider.secrets" -}}
{{- $secrets := dict "tls" .root.Values.tls.secretName "token" .root.Values.tls.tokenSecret "metrics-token" .root.Values.metricsTokenSecret -}}
{{- if has .pool (list "router" "ray") -}}
{{- $_ := set $secrets "api-keys" .root.Values.router.apiKeysSecret -}}
{{- $_ := set $secrets "admin-keys" .root.Values.router.adminKeysSecret -}}
{{- $_ := set $secrets "https" .root.Values.router.tlsSecret -}}
{{- end -}}
{{- toYaml $secrets -}}
{{- end -}}

{{- define "outrider.secretMounts" -}}
{{- range $folder, $secret := include "outrider.secrets" . | fromYaml }}
{{- if $secret }}
- {name: {{ $folder }}, mountPath: /etc/outrider-secrets/{{ $folder }}, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "outrider.secretVolumes" -}}
{{- range $folder, $secret := include "outrider.secrets" . | fromYaml }}
{{- if $secret }}
- {name: {{ $folder }}, secret: {secretName: {{ $secret | quote }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of a scrape: what opens the page of a pool. (dict "root" $ "pool" "router") */}}
{{- define "outrider.scrape" -}}
{{- $https := eq .pool "router" | ternary .root.Values.router.tlsSecret .root.Values.tls.secretName -}}
{{- if $https }}
scheme: https
tlsConfig:
  ca: {secret: {name: {{ $https | quote }}, key: ca.crt}}
  {{- if eq .pool "router" }}
  serverName: {{ required "router.tlsServerName: give the name that the certificate in router.tlsSecret is for" .root.Values.router.tlsServerName | quote }}
  {{- else }}
  cert: {secret: {name: {{ $https | quote }}, key: tls.crt}}
  keySecret: {name: {{ $https | quote }}, key: tls.key}
  serverName: {{ .root.Values.tls.serverName | quote }}
  {{- end }}
{{- end }}
{{- with .root.Values.metricsTokenSecret }}
authorization: {credentials: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- end -}}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Of a worker's container: what it asks of its node. (dict "pool" .Values.target) */}}
{{- define "outrider.resources" -}}
{{- $resources := deepCopy .pool.resources -}}
{{- if .pool.gpus -}}
{{- $gpus := dict .pool.gpuResource (toString .pool.gpus) -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "outrider.environment" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /models}
- {name: OUTRIDER_HOST, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- if .Values.huggingFaceSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .Values.huggingFaceSecret | quote }}, key: token}}}
{{- end }}
{{- end -}}

{{/* Of the pods that share a target: what vLLM and Ray need of it. */}}
{{- define "outrider.groupEnvironment" -}}
- {name: VLLM_HOST_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ .values.rayTokenSecret | quote }}, key: token}}}
{{- end -}}

{{- define "outrider.mounts" -}}
- {name: config, mountPath: /etc/outrider, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models}
{{- end -}}

{{- define "outrider.volumes" -}}
- {name: config, configMap: {name: {{ include "outrider.name" . }}}}
- {name: tmp, emptyDir: {sizeLimit: {{ .Values.tmpSize }}}}
{{- if or .Values.modelCache.claim .Values.modelCache.size }}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.modelCache.claim | default (printf "%s-models" (include "outrider.name" .)) }}}}
{{- else }}
- {name: models, emptyDir: {sizeLimit: {{ .Values.modelCache.emptyDirSize }}}}
{{- end }}
{{- end -}}

{{/* Rules of NetworkPolicies for calls that all pods make: DNS (5353: OpenShift's pods), spans, and what the values allow. */}}
{{- define "outrider.egress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- with dig "tracing" "endpoint" "" .Values.config }}
{{- $port := regexReplaceAll "^https?://[^/]*?(:([0-9]+))?(/.*)?$" . "${2}" | default (hasPrefix "https:" . | ternary "443" "80") }}
- ports: [{port: {{ $port }}, protocol: TCP}]
{{- end }}
{{- with .Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of every pod. (dict "root" $ "pool" "target" "values" .Values.target), and "asksKubernetes" of the head's with autoscaling. */}}
{{- define "outrider.pod" -}}
serviceAccountName: {{ include "outrider.name" .root }}{{ if .asksKubernetes }}-autoscaler{{ end }}
automountServiceAccountToken: {{ .asksKubernetes | default false }}
securityContext:
  {{- include "outrider.podSecurity" . | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
# The program drains by itself; it gets that long, and what leaving the lists of callers takes.
terminationGracePeriodSeconds: {{ add (include "outrider.drainSeconds" . | float64 | ceil | int) 20 }}
{{- end -}}

{{/* The container of a target or draft worker. (dict "root" $ "pool" "target" "values" .Values.target) */}}
{{- define "outrider.worker" -}}
{{- $port := eq .pool "target" | ternary 7000 7001 -}}
{{- $healthPort := empty .root.Values.tls.secretName | ternary $port (add $port 100) -}}
{{- $isLeader := and (eq .pool "target") (gt (include "outrider.nodesPerReplica" .root | int) 1) -}}
- name: {{ .pool }}
  image: {{ include "outrider.image" (dict "root" .root "suffix" .values.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if $isLeader }}
  # vLLM finds this Ray, and waits in it for the GPUs of the other nodes.
  command: [/bin/sh, -c, 'ray start --head --port=6379 --include-dashboard=false --disable-usage-stats && exec outrider "$@"', sh]
  {{- end }}
  args: [{{ .pool }}, --config, /etc/outrider/cluster.yaml]
  ports:
    {{- if not .host }}
    - {name: grpc, containerPort: {{ $port }}, protocol: TCP}
    {{- end }}
    - {name: {{ empty .host | ternary "metrics" "draft-metrics" }}, containerPort: {{ eq .pool "target" | ternary 9100 9101 }}, protocol: TCP}
  env:
    {{- include "outrider.environment" .root | nindent 4 }}
    {{- if $isLeader }}
    {{- include "outrider.groupEnvironment" . | nindent 4 }}
    {{- end }}
  {{- if not .host }}
  # It listens when it has loaded its model. One that stands still is not serving.
  startupProbe: {grpc: {port: {{ $healthPort }}}, periodSeconds: 5, failureThreshold: {{ div (add .values.startupSeconds 4) 5 }}}
  readinessProbe: {grpc: {port: {{ $healthPort }}}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 2}
  livenessProbe: {grpc: {port: {{ $healthPort }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
  {{- end }}
  # Callers look the name up every 3 s: until then they may still come.
  lifecycle: {preStop: {sleep: {seconds: 5}}}
  resources:
    {{- include "outrider.resources" (dict "pool" .values) | nindent 4 }}
  securityContext:
    {{- include "outrider.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    {{- include "outrider.mounts" .root | nindent 4 }}
    {{- include "outrider.secretMounts" . | nindent 4 }}
    {{- if eq .pool "target" }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
{{- end -}}

{{/* A pod of a worker, as a template. (dict "root" $ "pool" "target" "values" .Values.target) */}}
{{- define "outrider.workerPod" -}}
metadata:
  labels:
    {{- include "outrider.selector" . | nindent 4 }}
  annotations:
    checksum/config: {{ include "outrider.config" .root | sha256sum }}
spec:
  {{- include "outrider.pod" . | nindent 2 }}
  {{- if and (eq .pool "draft") .values.near }}
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: {{ .values.near }}
            labelSelector:
              matchLabels:
                {{- include "outrider.selector" (dict "root" .root "pool" "target") | nindent 16 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "outrider.selector" . | nindent 10 }}
  containers:
    {{- include "outrider.worker" . | nindent 4 }}
    {{- if and (eq .pool "target") (eq (include "outrider.drafts" .root) "sidecar") }}
    {{- include "outrider.worker" (dict "root" .root "pool" "draft" "values" .root.Values.draft "host" "127.0.0.1") | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "outrider.volumes" .root | nindent 4 }}
    {{- include "outrider.secretVolumes" . | nindent 4 }}
    {{- if eq .pool "target" }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .values.shmSize }}}}
    {{- end }}
{{- end -}}

{{/* A pod that lends its GPUs to the target of its group, as a template. */}}
{{- define "outrider.nodePod" -}}
metadata:
  labels:
    {{- include "outrider.selector" (dict "root" .root "pool" "target-node") | nindent 4 }}
  annotations:
    checksum/config: {{ include "outrider.config" .root | sha256sum }}
spec:
  {{- include "outrider.pod" . | nindent 2 }}
  containers:
    - name: node
      image: {{ include "outrider.image" (dict "root" .root "suffix" .values.image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      # It waits for the leader, as a pod that gives up has the whole group made again.
      command:
        - /bin/sh
        - -c
        - |
          until ray health-check --address "$LWS_LEADER_ADDRESS:6379"; do sleep 2; done
          exec ray start --address="$LWS_LEADER_ADDRESS:6379" --disable-usage-stats --block
      env:
        {{- include "outrider.environment" .root | nindent 8 }}
        {{- include "outrider.groupEnvironment" . | nindent 8 }}
      resources:
        {{- include "outrider.resources" (dict "pool" .values) | nindent 8 }}
      securityContext:
        {{- include "outrider.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "outrider.mounts" .root | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    {{- include "outrider.volumes" .root | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .values.shmSize }}}}
{{- end -}}
