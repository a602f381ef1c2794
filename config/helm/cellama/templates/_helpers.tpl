{{- define "cellama.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "cellama.selector" -}}
app.kubernetes.io/name: cellama
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "cellama.labels" -}}
{{ include "cellama.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "cellama.image" -}}
{{ required "image.repository: set the repository of your cellama image" .Values.image.repository }}:{{ required "image.tag: set the tag of your cellama image" .Values.image.tag }}
{{- end }}

{{- /* Fields of every pod. Service links would set CELLAMA_METRICS_PORT and other variables that cellama reads. */ -}}
{{- define "cellama.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Environment of every cellama container. */ -}}
{{- define "cellama.env" -}}
- name: HOME
  value: /cache
- name: CELLAMA_CONFIG
  value: /etc/cellama/cellama.toml
- name: CELLAMA_POOL
  value: {{ .Values.pool | quote }}
{{- if .Values.redis.urlSecret.name }}
- name: CELLAMA_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.urlSecret.name }}, key: {{ .Values.redis.urlSecret.key }}}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ required "redis.passwordSecret.name: set it, or set redis.urlSecret.name" .Values.redis.passwordSecret.name }}, key: {{ .Values.redis.passwordSecret.key }}}
- name: CELLAMA_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "cellama.name" . }}-redis:6379/0
{{- end }}
{{- end }}

{{- define "cellama.mounts" -}}
- {name: config, mountPath: /etc/cellama, readOnly: true}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "cellama.volumes" -}}
- name: config
  configMap: {name: {{ include "cellama.name" . }}}
- name: tmp
  emptyDir: {}
{{- end }}
