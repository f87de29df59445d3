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

{{- define "outrider.image" -}}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{ printf "%s:%s-%s" .root.Values.image.repository $tag .suffix }}
{{- end -}}

{{- define "outrider.drainSeconds" -}}
{{- $section := index .root.Values.config .pool | default dict -}}
{{ $section.drain_seconds | default 30 }}
{{- end -}}

{{/* Where draft workers are: a pool, a sidecar of each target, or nothing when there are none. */}}
{{- define "outrider.drafts" -}}
{{- $draft := .Values.config.draft | default dict -}}
{{- $speculation := .Values.config.speculation | default dict -}}
{{- $replicas := int (dig "replicas" 1 $draft) -}}
{{- if and (ne (toString $draft.drafter) "engine") (ne $replicas 0) (ne (int (dig "num_speculative_tokens" 4 $speculation)) 0) -}}
{{- $placement := $draft.placement | default "pool" -}}
{{- if and (eq $placement "sidecar") (ne $replicas 1) -}}
{{- fail (printf "config.draft.replicas %d: in a pod there is one sidecar, set it to 1" $replicas) -}}
{{- end -}}
{{ $placement }}
{{- end -}}
{{- end -}}

{{/* The tree that all programs read: what is configured, and where they listen and find each other. */}}
{{- define "outrider.config" -}}
{{- $name := include "outrider.name" . -}}
{{- $config := deepCopy .Values.config -}}
{{- $router := dict "host" "0.0.0.0" "port" 8000 -}}
{{- $target := dict "addresses" (list (printf "dns:%s-target:7000" $name)) "listen" "0.0.0.0:7000" "metrics_host" "0.0.0.0" "metrics_port" 9100 -}}
{{- $addresses := dict "pool" (list (printf "dns:%s-draft:7001" $name)) "sidecar" (list "127.0.0.1:7001") -}}
{{- $where := include "outrider.drafts" . -}}
{{- $listen := eq $where "sidecar" | ternary "127.0.0.1:7001" "0.0.0.0:7001" -}}
{{- $draft := dict "addresses" (get $addresses $where | default list) "listen" $listen "metrics_host" "0.0.0.0" "metrics_port" 9101 -}}
{{- toYaml (mergeOverwrite $config (dict "router" $router "target" $target "draft" $draft)) -}}
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
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .Values.huggingFaceSecret }}, key: token}}}
{{- end }}
{{- end -}}

{{- define "outrider.mounts" -}}
- {name: config, mountPath: /etc/outrider, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models}
{{- end -}}

{{- define "outrider.volumes" -}}
- {name: config, configMap: {name: {{ include "outrider.name" . }}}}
- {name: tmp, emptyDir: {}}
{{- if or .Values.modelCache.claim .Values.modelCache.size }}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.modelCache.claim | default (printf "%s-models" (include "outrider.name" .)) }}}}
{{- else }}
- {name: models, emptyDir: {}}
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
- name: {{ .pool }}
  image: {{ include "outrider.image" (dict "root" .root "suffix" .values.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [{{ .pool }}, --config, /etc/outrider/cluster.yaml]
  ports:
    {{- if not .host }}
    - {name: grpc, containerPort: {{ $port }}, protocol: TCP}
    {{- end }}
    - {name: {{ empty .host | ternary "metrics" "draft-metrics" }}, containerPort: {{ eq .pool "target" | ternary 9100 9101 }}, protocol: TCP}
  env:
    {{- include "outrider.environment" .root | nindent 4 }}
  {{- if not .host }}
  # It listens when it has loaded its model. One that stands still is not serving.
  startupProbe: {grpc: {port: {{ $port }}}, periodSeconds: 5, failureThreshold: {{ div (add .values.startupSeconds 4) 5 }}}
  readinessProbe: {grpc: {port: {{ $port }}}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 2}
  livenessProbe: {grpc: {port: {{ $port }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
  {{- end }}
  # Callers look the name up every 3 s: until then they may still come.
  lifecycle: {preStop: {sleep: {seconds: 5}}}
  resources:
    {{- include "outrider.resources" (dict "pool" .values) | nindent 4 }}
  securityContext:
    {{- include "outrider.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    {{- include "outrider.mounts" .root | nindent 4 }}
    {{- if eq .pool "target" }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
{{- end -}}
